//! Ranks to drive a plugin with.
