//! Detects how a NIC transforms the addresses and ports before it hashes them, from the queues on which packets arrive.
//! This is needed for mlx5, which hashes symmetrically by default but reports it only from Linux 6.15 on.

use std::net::SocketAddr;

use coreward_intf as intf;
use coreward_model::FourTuple;
use coreward_model::rss::{RssConfig, RssInputTransform};
use coreward_model::tuple::address_from_words;

use super::rss_verifier::{RssTableVerdict, RssTableVerifier};

/// Search for the NIC's input transform: the one that predicts the receive queues of the sampled packets correctly.
#[derive(Debug, Default)]
pub struct InputTransformSearch {
    transform_candidates: Vec<InputTransformCandidate>,
    last_sample_number: u32,
}

/// Input transform that the NIC may use, with the verifier of the receive queues that it predicts.
#[derive(Debug)]
struct InputTransformCandidate {
    input_transform: RssInputTransform,
    verifier: RssTableVerifier,
    matched_sample_count: u64,
    mismatched_sample_count: u64,
}

impl InputTransformSearch {
    /// Restarts the search after the indirection table has changed. Ignores samples up to `last_sample_number`.
    pub fn restart(&mut self, last_sample_number: u32) {
        *self = Self { transform_candidates: Vec::new(), last_sample_number };
    }

    pub fn last_sample_number(&self) -> u32 {
        self.last_sample_number
    }

    /// Evaluates samples that are newer than [`last_sample_number`](Self::last_sample_number), with all transforms
    /// except the one in `rss_config`. Returns the only transform that predicts the samples' receive queues correctly,
    /// or `None` if it is not yet known.
    pub fn observe_samples(
        &mut self,
        rss_config: &RssConfig,
        samples: &[intf::rss_sample],
    ) -> Option<RssInputTransform> {
        if self.transform_candidates.is_empty() {
            let other_transforms = RssInputTransform::ALL
                .into_iter()
                .filter(|input_transform| *input_transform != rss_config.key.input_transform());
            let build_candidate = |input_transform| InputTransformCandidate {
                input_transform,
                verifier: RssTableVerifier::default(),
                matched_sample_count: 0,
                mismatched_sample_count: 0,
            };
            self.transform_candidates = other_transforms.map(build_candidate).collect();
        }
        self.last_sample_number = samples.iter().map(|sample| sample.sequence).max().unwrap_or(self.last_sample_number);
        let matching_transforms =
            self.transform_candidates.iter_mut().filter_map(|candidate| candidate.observe_samples(rss_config, samples));
        let explaining_transforms: Vec<RssInputTransform> = matching_transforms.collect();
        // If two transforms predict the queues, it is unknown which one the NIC uses.
        if let [only_transform] = explaining_transforms[..] { Some(only_transform) } else { None }
    }
}

impl InputTransformCandidate {
    fn observe_samples(&mut self, rss_config: &RssConfig, samples: &[intf::rss_sample]) -> Option<RssInputTransform> {
        let transformed_key = rss_config.key.with_input_transform(self.input_transform);
        for sample in samples {
            let Some(four_tuple) = sampled_four_tuple(sample) else { continue };
            let predicted_queue =
                rss_config.indirection_table.queue_for_hash(transformed_key.toeplitz_hash(&four_tuple.bytes()));
            let match_count = if predicted_queue == sample.actual_queue {
                &mut self.matched_sample_count
            } else {
                &mut self.mismatched_sample_count
            };
            *match_count += 1;
        }
        let rss_verdict = self.verifier.observe_counts(
            &rss_config.indirection_table,
            self.matched_sample_count,
            self.mismatched_sample_count,
        );
        (rss_verdict == RssTableVerdict::InForce).then_some(self.input_transform)
    }
}

/// Returns the addresses and ports of the sampled packet, or `None` if a newer sample is overwriting them.
fn sampled_four_tuple(sample: &intf::rss_sample) -> Option<FourTuple> {
    let source = SocketAddr::new(address_from_words(sample.source_address), u16::from_be(sample.source_port));
    let destination =
        SocketAddr::new(address_from_words(sample.destination_address), u16::from_be(sample.destination_port));
    FourTuple::new(source, destination).ok()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use coreward_model::rss::{IndirectionTable, RssKey};
    use coreward_model::tuple::address_to_words;

    use super::*;

    fn rss_config() -> RssConfig {
        RssConfig {
            key: RssKey::microsoft_verification_key(),
            indirection_table: IndirectionTable::draw_balanced_entries(1, 128, 4).unwrap(),
        }
    }

    /// Returns samples of SYNs from many clients, on the receive queues that a NIC with this input transform selects.
    fn build_syn_samples(
        input_transform: Option<RssInputTransform>,
        sample_numbers: std::ops::Range<u32>,
    ) -> Vec<intf::rss_sample> {
        let build_sample = |sequence: u32| {
            let (client, vip): (IpAddr, IpAddr) = if sequence.is_multiple_of(2) {
                (Ipv4Addr::from(0x0a01_0000 | sequence).into(), Ipv4Addr::new(10, 200, 0, 1).into())
            } else {
                let ipv6_prefix = 0x2001_0db8_u128 << 96;
                (
                    Ipv6Addr::from(ipv6_prefix | u128::from(sequence)).into(),
                    Ipv6Addr::from(ipv6_prefix | 1 << 64).into(),
                )
            };
            let mut sample = intf::rss_sample {
                source_address: address_to_words(client),
                destination_address: address_to_words(vip),
                source_port: (40_000 + 7 * sequence as u16).to_be(),
                destination_port: 80u16.to_be(),
                sequence,
                ..Default::default()
            };
            let predict_queue = |input| {
                rss_config().indirection_table.queue_for_hash(
                    rss_config()
                        .key
                        .with_input_transform(input)
                        .toeplitz_hash(&sampled_four_tuple(&sample).unwrap().bytes()),
                )
            };
            sample.actual_queue = input_transform.map_or(sequence as u16 % 4, predict_queue);
            sample
        };
        sample_numbers.map(build_sample).collect()
    }

    #[test]
    fn accidental_match_does_not_select_an_input_transform() {
        for input in [RssInputTransform::SymmetricXor, RssInputTransform::SymmetricOrXor] {
            let mut search = InputTransformSearch::default();
            assert_eq!(search.observe_samples(&rss_config(), &build_syn_samples(Some(input), 1..5)), None, "too few");
            assert_eq!(search.observe_samples(&rss_config(), &build_syn_samples(Some(input), 5..100)), Some(input));
            assert_eq!(search.last_sample_number(), 99);
        }
        let mut search = InputTransformSearch::default();
        assert_eq!(search.observe_samples(&rss_config(), &build_syn_samples(None, 1..200)), None);
        assert_eq!(
            search.observe_samples(&rss_config(), &build_syn_samples(Some(RssInputTransform::None), 200..400)),
            None,
            "as it is shown"
        );
    }

    #[test]
    fn input_transform_that_the_nic_has_disabled_is_detected() {
        let symmetric_config =
            RssConfig { key: rss_config().key.with_input_transform(RssInputTransform::SymmetricOrXor), ..rss_config() };
        let mut search = InputTransformSearch::default();
        let untransformed_samples = build_syn_samples(Some(RssInputTransform::None), 1..100);
        assert_eq!(search.observe_samples(&symmetric_config, &untransformed_samples), Some(RssInputTransform::None));
    }
}
