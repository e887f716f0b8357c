//! Numbers that a seed decides: the same on every machine and with every version of every crate.

/// A generator of pseudo-random numbers (splitmix64).
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// Whether something happens that happens `times` in `of` cases.
    pub(super) fn chance(&mut self, times: usize, of: usize) -> bool {
        self.below(of) < times
    }

    /// Returns one of the values; `None` if there are none.
    pub(super) fn one<T: Clone>(&mut self, values: &[T]) -> Option<T> {
        if values.is_empty() { None } else { values.get(self.below(values.len())).cloned() }
    }

    /// Returns one of the values of an array.
    pub(super) fn of<T: Copy, const N: usize>(&mut self, values: [T; N]) -> T {
        values[self.below(N)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_everywhere() {
        let mut random = Random::new(7);
        let drawn: Vec<usize> = (0..5).map(|_| random.below(1000)).collect();
        let mut again = Random::new(7);
        assert_eq!(drawn, (0..5).map(|_| again.below(1000)).collect::<Vec<_>>());
        assert!(drawn.iter().all(|number| *number < 1000));
    }
}
