//! Permutation that hides a cookie's number, selected by the keyed hash of the connection.
//!
//! The permutation has three rounds, each of which multiplies by an odd factor and XORs with a right shift. A XOR comes
//! before the rounds and an addition after them. All their operands are bits of the hash. A multiplication carries
//! differences to higher bits only, a shift to lower bits only. An affine permutation would not suffice, because the
//! quotient of two differences of hidden numbers would be equal for every connection and key.

use coreward_intf as intf;

/// Family of keyed permutations of the numbers below 2^`bit_count`. A connection's hash selects one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyedPermutation {
    bit_count: u32,
}

/// Number of rounds in a permutation, with one multiplication each. With two rounds, the test
/// `bit_flips_change_permuted_values_uniformly` fails.
const PERMUTATION_ROUND_COUNT: u32 = 3;

impl KeyedPermutation {
    /// Permutation that hides the kind and the number in a cookie.
    pub const COOKIE: Self = Self { bit_count: intf::COOKIE_HIDDEN_BITS };

    /// Permutation that hides the server's id in a cookie that the load balancer stamps.
    pub const LB_STAMPED_COOKIE: Self = Self { bit_count: intf::LB_STAMPING_ID_BITS };

    /// Returns the number that hides `plain_number` in a cookie of the connection with hash `hash`. Both numbers are
    /// below 2^`bit_count`.
    pub fn hide(self, hash: u64, plain_number: u32) -> u32 {
        let mut number = u64::from(plain_number).wrapping_sub(self.hash_addend(hash)) & self.bit_mask();
        for round in (1..=PERMUTATION_ROUND_COUNT).rev() {
            number = self.invert_xor_shift_right(number).wrapping_mul(modular_inverse(self.round_factor(hash, round)))
                & self.bit_mask();
        }
        (self.invert_xor_shift_right(number) ^ hash & self.bit_mask()) as u32
    }

    /// Returns the plain number that [`hide`](Self::hide) turned into `hidden_number`.
    pub fn reveal(self, hash: u64, hidden_number: u32) -> u32 {
        let mut number = self.xor_shift_right((u64::from(hidden_number) ^ hash) & self.bit_mask());
        for round in 1..=PERMUTATION_ROUND_COUNT {
            number = self.xor_shift_right(number.wrapping_mul(self.round_factor(hash, round)) & self.bit_mask());
        }
        (number.wrapping_add(self.hash_addend(hash)) & self.bit_mask()) as u32
    }

    fn bit_mask(self) -> u64 {
        (1 << self.bit_count) - 1
    }

    /// Returns the odd factor by which round `round` multiplies. Its bits above `bit_count` have no effect.
    fn round_factor(self, hash: u64, round: u32) -> u64 {
        hash >> (self.bit_count * round) | 1
    }

    fn hash_addend(self, hash: u64) -> u64 {
        hash >> (u64::BITS - self.bit_count)
    }

    fn xor_shift_right(self, number: u64) -> u64 {
        number ^ number >> (self.bit_count / 2)
    }

    fn invert_xor_shift_right(self, number: u64) -> u64 {
        self.xor_shift_right(number) ^ number >> (self.bit_count / 2 * 2)
    }
}

/// Returns the inverse of an odd factor modulo 2^20 by Newton's method, whose steps double the number of correct bits.
fn modular_inverse(factor: u64) -> u64 {
    let inverse_modulo_32 = factor.wrapping_mul(3) ^ 2;
    let newton_step =
        |approximation: u64| approximation.wrapping_mul(2u64.wrapping_sub(factor.wrapping_mul(approximation)));
    newton_step(newton_step(inverse_modulo_32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rss::seeded_rng;
    use rand::Rng as _;

    const TESTED_PERMUTATIONS: [KeyedPermutation; 2] = [KeyedPermutation::COOKIE, KeyedPermutation::LB_STAMPED_COOKIE];

    #[test]
    fn every_hidden_number_is_revealed() {
        let mut rng = seeded_rng(1, 0);
        for permutation in TESTED_PERMUTATIONS {
            for hash in [0, u64::MAX].into_iter().chain((0..20).map(|_| rng.next_u64())) {
                for plain_number in 0..1 << permutation.bit_count {
                    let hidden_number = permutation.hide(hash, plain_number);
                    assert!(hidden_number < 1 << permutation.bit_count, "{hidden_number}");
                    assert_eq!(permutation.reveal(hash, hidden_number), plain_number);
                }
            }
        }
    }

    /// A change of one bit in a plain or a hidden number changes the converted number unpredictably.
    #[test]
    fn bit_flips_change_permuted_values_uniformly() {
        let mut rng = seeded_rng(4, 0);
        let draw_count = 1 << 19;
        for permutation in TESTED_PERMUTATIONS {
            let mut difference_counts = vec![0u32; 1 << permutation.bit_count];
            for bit in 0..permutation.bit_count {
                for convert in [KeyedPermutation::hide, KeyedPermutation::reveal] {
                    difference_counts.fill(0);
                    let number = rng.next_u64() as u32 & permutation.bit_mask() as u32;
                    for _ in 0..draw_count {
                        let hash = rng.next_u64();
                        let difference =
                            convert(permutation, hash, number) ^ convert(permutation, hash, number ^ 1 << bit);
                        difference_counts[difference as usize] += 1;
                    }
                    // By chance, 16 and 256 each are expected.
                    let expected_count = draw_count >> permutation.bit_count;
                    let max_count = difference_counts.iter().max().unwrap();
                    assert!(*max_count < 30 + 2 * expected_count, "bit {bit} of {permutation:?}: {max_count}");
                }
            }
        }
    }

    /// The difference between the hidden numbers of two servers depends on the connection. In another connection, the
    /// same difference leads to the second server only by chance, so probing one connection does not help there.
    #[test]
    fn hidden_number_difference_depends_on_the_connection() {
        let mut rng = seeded_rng(2, 0);
        for permutation in TESTED_PERMUTATIONS {
            let number_count = 1 << permutation.bit_count;
            let (first_number, second_number) = (number_count / 3, number_count / 5);
            let draw_count = 40_000;
            let known_difference = {
                let hash = rng.next_u64();
                permutation.hide(hash, first_number) ^ permutation.hide(hash, second_number)
            };
            let mut hit_count = 0;
            for _ in 0..draw_count {
                let hash = rng.next_u64();
                hit_count += u32::from(
                    permutation.reveal(hash, permutation.hide(hash, first_number) ^ known_difference) == second_number,
                );
            }
            // By chance, draws / count are expected, which is 1.2 and 20.
            assert!(
                f64::from(hit_count) < 8.0 + 3.0 * f64::from(draw_count) / f64::from(number_count),
                "{hit_count} of {draw_count}"
            );
        }
    }

    /// Returns whether the quotients of two differences, modulo `modulus`, agree between two lists of hidden numbers.
    fn difference_quotients_agree(known_numbers: [u32; 3], other_numbers: [u32; 3], modulus: u64) -> bool {
        let subtract_modular = |a: u32, b: u32| (u64::from(a) + modulus - u64::from(b) % modulus) % modulus;
        let [known_differences, other_differences] = [known_numbers, other_numbers]
            .map(|numbers| [subtract_modular(numbers[0], numbers[1]), subtract_modular(numbers[0], numbers[2])]);
        // The quotients known[1] / known[0] and other[1] / other[0] are compared by their cross products.
        known_differences[1] * other_differences[0] % modulus == other_differences[1] * known_differences[0] % modulus
    }

    /// A client that has probed one connection knows the differences between its hidden numbers. If it also knows two
    /// hidden numbers of another connection, it must not be able to compute a third. The test compares quotients of
    /// differences modulo a prime and modulo a power of two, and XORs of numbers.
    #[test]
    fn known_differences_do_not_predict_hidden_numbers_of_another_connection() {
        let mut rng = seeded_rng(3, 0);
        for (permutation, bits, prime) in
            [(KeyedPermutation::COOKIE, 15, 32_749u64), (KeyedPermutation::LB_STAMPED_COOKIE, 11, 2_039)]
        {
            let moduli = [prime, 1 << bits];
            let plain_numbers = [1, 5, 7].map(|eighth_count| (1u32 << bits) / 8 * eighth_count + 3);
            let mut hit_counts = [0; 3];
            let draw_count = 20_000;
            for _ in 0..draw_count {
                let hashes = [rng.next_u64(), rng.next_u64()];
                let [known_numbers, other_numbers] =
                    hashes.map(|hash| plain_numbers.map(|plain_number| permutation.hide(hash, plain_number)));
                for (hit_count, modulo) in hit_counts.iter_mut().zip(moduli) {
                    *hit_count += u32::from(difference_quotients_agree(known_numbers, other_numbers, modulo));
                }
                hit_counts[2] += u32::from(
                    known_numbers[0] ^ known_numbers[1] ^ known_numbers[2]
                        == other_numbers[0] ^ other_numbers[1] ^ other_numbers[2],
                );
            }
            // By chance, draws / 2^bits are expected, which is 0.6 and 10. Products modulo 2^bits agree more often, by
            // factors of two.
            let expected_count = f64::from(draw_count) / f64::from(1 << bits);
            assert!(
                hit_counts.iter().all(|hit_count| f64::from(*hit_count) < 12.0 + 12.0 * expected_count),
                "{hit_counts:?} of {draw_count}"
            );
        }
    }
}
