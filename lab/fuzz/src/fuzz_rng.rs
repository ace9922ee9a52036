//! Random numbers that are reproducible from a seed.

use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

pub struct FuzzRng(pub Xoshiro256PlusPlus);

impl FuzzRng {
    /// Returns a generator whose numbers are all determined by `seed` and `rng_stream`.
    pub fn new(seed: u64, rng_stream: u64) -> Self {
        Self(seeded_rng(seed, rng_stream))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub fn next_u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    pub fn next_u16(&mut self) -> u16 {
        self.0.next_u32() as u16
    }

    pub fn next_u8(&mut self) -> u8 {
        self.0.next_u32() as u8
    }

    /// Returns a random number below `bound`, which must not be 0.
    pub fn random_below(&mut self, bound: usize) -> usize {
        uniform_below(&mut self.0, bound as u32) as usize
    }

    /// Returns true with the probability `numerator` / `denominator`.
    pub fn random_bool(&mut self, numerator: usize, denominator: usize) -> bool {
        self.random_below(denominator) < numerator
    }

    /// Returns a random element of `choices`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.random_below(choices.len())]
    }

    pub fn fill_bytes(&mut self, bytes: &mut [u8]) {
        self.0.fill_bytes(bytes);
    }
}
