//! Foreign libraries that oxygin uses when they are there: types, and symbols
//! resolved at run time. Nothing here is linked; a missing library is an
//! [`Missing`] value with a sentence for the log.
