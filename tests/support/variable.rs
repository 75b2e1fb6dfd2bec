//! Environment variables of one test.

/// A variable that is there for one test; the turn is held.
pub struct Variable(&'static str);

impl Variable {
    /// Sets it.
    pub fn set(name: &'static str, value: &str) -> Self {
        std::env::set_var(name, value);
        Self(name)
    }
}

impl Drop for Variable {
    fn drop(&mut self) {
        std::env::remove_var(self.0);
    }
}
