//! How a cookie's number is hidden: by a permutation that the keyed hash of the connection draws.
//!
//! `plain = (factor * hidden + offset) mod prime`. The family is pairwise independent (Carter and Wegman, 1979): whoever
//! knows one hidden number of a connection, and what it stands for, knows nothing of any other one, nor of another
//! connection's. With XOR in its place the difference of two ids would be the same for every connection, and 2^15 probes
//! of one connection would show all differences.

use coreward_intf as intf;

/// A family of permutations of the numbers below 2^bits. Those from `prime` on stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    bits: u32,
    /// The largest prime below 2^bits.
    prime: u64,
    /// A power of two: factors are 1 to this.
    factors: u64,
}

impl Permutation {
    /// Of kind and id in a cookie.
    pub const COOKIE: Self =
        Self { bits: intf::COOKIE_HIDDEN_BITS, prime: intf::COOKIE_PRIME as u64, factors: intf::COOKIE_FACTORS as u64 };

    /// Of the id in a cookie that a load balancer stamps.
    pub const LB_STAMPED: Self = Self {
        bits: intf::CORRECTION_ID_BITS,
        prime: intf::CORRECTION_PRIME as u64,
        factors: intf::CORRECTION_FACTORS as u64,
    };

    /// What `plain` becomes in a cookie of the connection with that hash; both below 2^bits.
    pub fn hide(self, hash: u64, plain: u32) -> u32 {
        let plain = u64::from(plain);
        if plain >= self.prime {
            return plain as u32;
        }
        let (factor, offset) = self.drawn(hash);
        ((plain + 2 * self.prime - offset) % self.prime * self.inverse(factor) % self.prime) as u32
    }

    /// The number that [`hide`](Self::hide) hid.
    pub fn reveal(self, hash: u64, hidden: u32) -> u32 {
        let hidden = u64::from(hidden);
        if hidden >= self.prime {
            return hidden as u32;
        }
        let (factor, offset) = self.drawn(hash);
        ((factor * hidden + offset) % self.prime) as u32
    }

    /// The inverse of each factor modulo the prime, by factor - 1: for the BPF programs that hide numbers.
    pub fn inverses(self) -> impl Iterator<Item = u16> {
        (1..=self.factors).map(move |factor| self.inverse(factor) as u16)
    }

    fn drawn(self, hash: u64) -> (u64, u64) {
        let factor = (hash >> self.bits & (self.factors - 1)) + 1;
        (factor, hash & ((1 << self.bits) - 1))
    }

    /// factor^(prime - 2) (Fermat).
    fn inverse(self, factor: u64) -> u64 {
        let (mut power, mut square, mut exponent) = (1, factor, self.prime - 2);
        while exponent > 0 {
            if exponent & 1 == 1 {
                power = power * square % self.prime;
            }
            square = square * square % self.prime;
            exponent >>= 1;
        }
        power
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rss::seeded_rng;
    use rand::Rng as _;

    const BOTH: [Permutation; 2] = [Permutation::COOKIE, Permutation::LB_STAMPED];

    #[test]
    fn every_hidden_number_reveals_its_plain_one() {
        let mut rng = seeded_rng(1, 0);
        for permutation in BOTH {
            for hash in [0, u64::MAX].into_iter().chain((0..20).map(|_| rng.next_u64())) {
                for plain in 0..1 << permutation.bits {
                    let hidden = permutation.hide(hash, plain);
                    assert!(hidden < 1 << permutation.bits, "{hidden}");
                    assert_eq!(permutation.reveal(hash, hidden), plain);
                }
            }
        }
    }

    #[test]
    fn the_reciprocal_of_intf_h_divides_every_sum() {
        let of = [
            (Permutation::COOKIE, u64::from(intf::COOKIE_RECIPROCAL), intf::COOKIE_RECIPROCAL_SHIFT),
            (Permutation::LB_STAMPED, u64::from(intf::CORRECTION_RECIPROCAL), intf::CORRECTION_RECIPROCAL_SHIFT),
        ];
        for (Permutation { prime, bits, .. }, reciprocal, shift) in of {
            let last = (prime - 1) * (prime - 1) + (1 << bits);
            for quotient in 0..=last / prime {
                for sum in [quotient * prime, quotient * prime + prime - 1] {
                    assert_eq!((sum * reciprocal) >> shift, quotient, "{sum} / {prime}");
                }
            }
        }
    }

    /// What a client learns by probing one connection does not help it with another: a difference of hidden numbers that leads
    /// from one server to another there leads to that server here as often as any other number would.
    #[test]
    fn differences_of_one_connection_do_not_hold_for_another() {
        let mut rng = seeded_rng(2, 0);
        for permutation in BOTH {
            let count = 1 << permutation.bits;
            let (here, there) = (count / 3, count / 5);
            let draws = 40_000;
            let known = {
                let hash = rng.next_u64();
                permutation.hide(hash, here) ^ permutation.hide(hash, there)
            };
            let mut hits = 0;
            for _ in 0..draws {
                let hash = rng.next_u64();
                hits += u32::from(permutation.reveal(hash, permutation.hide(hash, here) ^ known) == there);
            }
            // By chance draws / count: 1.2 and 20.
            assert!(f64::from(hits) < 8.0 + 3.0 * f64::from(draws) / f64::from(count), "{hits} of {draws}");
        }
    }
}
