//! Bringing ranks together: rendezvous, exchanges, deadlines.
