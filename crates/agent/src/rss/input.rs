//! Detection of the transform that a NIC applies to the hash input, by the queues on which packets arrive. mlx5 hashes
//! symmetrically by default, and its driver reports this only from Linux 6.15 on.

use std::net::SocketAddr;

use coreward_intf as intf;
use coreward_model::FourTuple;
use coreward_model::rss::{InputTransform, RssConfig};
use coreward_model::tuple::address_from_words;

use super::rss_verifier::{RssVerifier, Verdict};

/// Search for the input transform that explains the receive queues of the sampled packets.
#[derive(Debug, Default)]
pub struct TransformSearch {
    candidates: Vec<Candidate>,
    /// Sequence number of the newest sample that was evaluated.
    last_sample: u32,
}

/// Candidate transform, and the verifier of its predictions.
#[derive(Debug)]
struct Candidate {
    input: InputTransform,
    verifier: RssVerifier,
    matched: u64,
    mismatched: u64,
}

impl TransformSearch {
    /// Restarts the search after a change of the table, ignoring samples up to `last_sample_number`.
    pub fn restart(&mut self, last_sample: u32) {
        *self = Self { candidates: Vec::new(), last_sample };
    }

    pub fn last_sample(&self) -> u32 {
        self.last_sample
    }

    /// Evaluates samples that are newer than [`last_sample_number`](Self::last_sample_number). Returns the transform
    /// that explains their queues, if `rss` has another one.
    pub fn observe(&mut self, rss: &RssConfig, samples: &[intf::rss_sample]) -> Option<InputTransform> {
        if self.candidates.is_empty() {
            let others = InputTransform::ALL.into_iter().filter(|input| *input != rss.key.input_transform());
            let candidate = |input| Candidate { input, verifier: RssVerifier::default(), matched: 0, mismatched: 0 };
            self.candidates = others.map(candidate).collect();
        }
        self.last_sample = samples.iter().map(|sample| sample.sequence).max().unwrap_or(self.last_sample);
        let found = self.candidates.iter_mut().filter_map(|candidate| candidate.observe(rss, samples));
        let found: Vec<InputTransform> = found.collect();
        // If two transforms match, neither is proven.
        if let [only] = found[..] { Some(only) } else { None }
    }
}

impl Candidate {
    fn observe(&mut self, rss: &RssConfig, samples: &[intf::rss_sample]) -> Option<InputTransform> {
        let key = rss.key.with_input(self.input);
        for sample in samples {
            let Some(tuple) = tuple(sample) else { continue };
            let queue = rss.indirection_table.queue(key.toeplitz(&tuple.bytes()));
            let count = if queue == sample.actual_queue { &mut self.matched } else { &mut self.mismatched };
            *count += 1;
        }
        let verdict = self.verifier.observe(&rss.indirection_table, self.matched, self.mismatched);
        (verdict == Verdict::InForce).then_some(self.input)
    }
}

/// Returns the addresses and ports of a sample, or `None` if a newer sample is overwriting it.
fn tuple(sample: &intf::rss_sample) -> Option<FourTuple> {
    let source = SocketAddr::new(address_from_words(sample.source_address), u16::from_be(sample.source_port));
    let destination =
        SocketAddr::new(address_from_words(sample.destination_address), u16::from_be(sample.destination_port));
    FourTuple::new(source, destination).ok()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use coreward_model::rss::{IndirectionTable, RssKey};
    use coreward_model::tuple::address_words;

    use super::*;

    fn rss() -> RssConfig {
        RssConfig { key: RssKey::microsoft(), indirection_table: IndirectionTable::balanced(1, 128, 4).unwrap() }
    }

    /// Returns samples of SYNs from many clients, on the queues of a NIC that hashes by `input`.
    fn delivered(input: Option<InputTransform>, sequences: std::ops::Range<u32>) -> Vec<intf::rss_sample> {
        let sample = |sequence: u32| {
            let (client, vip): (IpAddr, IpAddr) = if sequence.is_multiple_of(2) {
                (Ipv4Addr::from(0x0a01_0000 | sequence).into(), Ipv4Addr::new(10, 200, 0, 1).into())
            } else {
                let prefix = 0x2001_0db8_u128 << 96;
                (Ipv6Addr::from(prefix | u128::from(sequence)).into(), Ipv6Addr::from(prefix | 1 << 64).into())
            };
            let mut sample = intf::rss_sample {
                source_address: address_words(client),
                destination_address: address_words(vip),
                source_port: (40_000 + 7 * sequence as u16).to_be(),
                destination_port: 80u16.to_be(),
                sequence,
                ..Default::default()
            };
            let queue = |input| {
                rss().indirection_table.queue(rss().key.with_input(input).toeplitz(&tuple(&sample).unwrap().bytes()))
            };
            sample.actual_queue = input.map_or(sequence as u16 % 4, queue);
            sample
        };
        sequences.map(sample).collect()
    }

    #[test]
    fn each_input_transform_is_recognised_and_chance_is_not() {
        for input in [InputTransform::SymmetricXor, InputTransform::SymmetricOrXor] {
            let mut search = TransformSearch::default();
            assert_eq!(search.observe(&rss(), &delivered(Some(input), 1..5)), None, "too few");
            assert_eq!(search.observe(&rss(), &delivered(Some(input), 5..100)), Some(input));
            assert_eq!(search.last_sample(), 99);
        }
        let mut search = TransformSearch::default();
        assert_eq!(search.observe(&rss(), &delivered(None, 1..200)), None);
        assert_eq!(search.observe(&rss(), &delivered(Some(InputTransform::None), 200..400)), None, "as it is shown");
    }

    #[test]
    fn switched_off_input_transform_is_recognised() {
        let symmetric = RssConfig { key: rss().key.with_input(InputTransform::SymmetricOrXor), ..rss() };
        let mut search = TransformSearch::default();
        let plain = delivered(Some(InputTransform::None), 1..100);
        assert_eq!(search.observe(&symmetric, &plain), Some(InputTransform::None));
    }
}
