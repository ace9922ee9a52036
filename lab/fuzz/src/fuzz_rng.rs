//! Random choices, reproducible from a seed.

use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

/// A generator with the draws that the fuzzer needs.
pub struct FuzzRng(pub Xoshiro256PlusPlus);

impl FuzzRng {
    /// The stream of `seed` for one purpose.
    pub fn new(seed: u64, purpose: u64) -> Self {
        Self(seeded_rng(seed, purpose))
    }

    /// 64 random bits.
    pub fn u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// 32 random bits.
    pub fn u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// 16 random bits.
    pub fn u16(&mut self) -> u16 {
        self.0.next_u32() as u16
    }

    /// 8 random bits.
    pub fn u8(&mut self) -> u8 {
        self.0.next_u32() as u8
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        uniform_below(&mut self.0, bound as u32) as usize
    }

    /// True in `times` of `of` cases.
    pub fn chance(&mut self, times: usize, of: usize) -> bool {
        self.below(of) < times
    }

    /// One of `choices`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill_bytes(bytes);
    }
}
