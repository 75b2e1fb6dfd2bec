//! What whoever asks for the same key shares, as long as somebody has it.

use super::sync::Mutex;
use std::sync::{Arc, Weak};

/// Things by key.
pub struct Keyed<K, T> {
    all: Mutex<Vec<(K, Weak<T>)>>,
}

impl<K: PartialEq, T> Keyed<K, T> {
    /// Nothing so far.
    pub const fn empty() -> Self {
        Self { all: Mutex::new(Vec::new()) }
    }

    /// The one of this key, made if nobody has it. Whoever comes meanwhile waits for as long as that takes.
    pub fn get_or_make<E>(&self, key: K, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        let mut all = self.all.lock();
        all.retain(|(_, thing)| thing.strong_count() > 0);
        if let Some(thing) = all.iter().find(|(its, _)| *its == key).and_then(|(_, thing)| thing.upgrade()) {
            return Ok(thing);
        }
        let made = Arc::new(make()?);
        all.push((key, Arc::downgrade(&made)));
        Ok(made)
    }

    /// Those who have it keep it; whoever comes gets another one.
    pub fn forget(&self, thing: &Arc<T>) {
        self.all.lock().retain(|(_, known)| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(thing)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_thing_until_nobody_has_it_or_it_is_forgotten() {
        let all = Keyed::empty();
        let get = |key, value| all.get_or_make(key, || Ok::<i32, ()>(value)).unwrap();
        let (one, other) = (get('a', 1), get('b', 2));
        assert_eq!((*get('a', 3), *get('b', 4)), (1, 2));
        drop(other);
        assert_eq!(*get('b', 5), 5, "nobody had it");
        all.forget(&one);
        let second = get('a', 6);
        assert_eq!((*one, *second, *get('a', 7)), (1, 6, 6));
    }

    #[test]
    fn what_cannot_be_made_is_asked_for_again() {
        let all = Keyed::empty();
        assert_eq!(all.get_or_make(0, || Err::<i32, _>("no")), Err("no"));
        assert_eq!(all.get_or_make(0, || Ok::<_, ()>(1)), Ok(Arc::new(1)));
    }
}
