//! A table by window number.

/// Values by window number; numbers are small and used again.
pub struct Table<T>(Vec<Option<T>>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Table<T> {
    /// The value of window `id`.
    #[inline]
    pub fn get(&self, id: u32) -> Option<&T> {
        self.0.get(id as usize)?.as_ref()
    }

    /// The value of window `id`, to change it.
    #[inline]
    pub fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        self.0.get_mut(id as usize)?.as_mut()
    }

    /// Sets the value of window `id` and returns the last one.
    pub fn insert(&mut self, id: u32, value: T) -> Option<T> {
        let at = id as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, || None);
        }
        self.0[at].replace(value)
    }

    /// Takes the value of window `id` out.
    pub fn remove(&mut self, id: u32) -> Option<T> {
        self.0.get_mut(id as usize)?.take()
    }

    /// All values, by window number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.0).filter_map(|(id, value)| Some((id, value.as_ref()?)))
    }

    /// All values, by window number, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        (0..).zip(&mut self.0).filter_map(|(id, value)| Some((id, value.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_its_last_value() {
        let mut table = Table::default();
        assert_eq!((table.insert(5, 'a'), table.insert(2, 'b'), table.insert(5, 'c')), (None, None, Some('a')));
        assert_eq!((table.get(5), table.get(4), table.get(9)), (Some(&'c'), None, None));
        *table.get_mut(2).unwrap() = 'd';
        table.iter_mut().for_each(|(id, value)| *value = if id == 5 { 'e' } else { *value });
        assert_eq!(table.iter().collect::<Vec<_>>(), [(2, &'d'), (5, &'e')]);
        assert_eq!((table.remove(5), table.remove(5), table.remove(9), table.get(5)), (Some('e'), None, None, None));
    }
}
