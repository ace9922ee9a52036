//! Generator of requests, with their arrival times, service times and connections.

use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::server::SimulatedRequest;
use super::service::ServiceTimeSampler;
use super::ticks::{TICKS_PER_SERVICE_TIME_UNIT, Tick};
use super::{ClassPriorities, RpcSimulationConfig};
use crate::random::draw_exponential;

/// Generator of requests with Poisson arrivals. Each quantity is drawn from its own random stream, so two policies or
/// loads get the same requests in the same order (common random numbers). Comparisons are therefore not affected by
/// random differences.
#[derive(Debug)]
pub struct RequestGenerator {
    mean_arrival_interval_ticks: f64,
    service_time_sampler: ServiceTimeSampler,
    connection_sampler: Option<ConnectionSampler>,
    priorities: ClassPriorities,
    last_arrival_at: Tick,
    arrival_rng: Xoshiro256PlusPlus,
    service_rng: Xoshiro256PlusPlus,
    hash_rng: Xoshiro256PlusPlus,
}

const RNG_STREAM_ARRIVALS: u64 = 0x7270_6301;
const RNG_STREAM_SERVICES: u64 = 0x7270_6302;
const RNG_STREAM_HASHES: u64 = 0x7270_6303;
const RNG_STREAM_CONNECTIONS: u64 = 0x7270_6304;

impl RequestGenerator {
    /// Creates a generator whose requests offer `load` times the capacity of the cores in `config`.
    pub fn new(config: &RpcSimulationConfig, load: f64) -> Self {
        let connection_sampler = config.connection_count.map(|count| {
            ConnectionSampler::new(
                count.get(),
                config.connection_skew,
                &mut seeded_rng(config.seed, RNG_STREAM_CONNECTIONS),
            )
        });
        Self {
            mean_arrival_interval_ticks: config.service_times.mean() / (load * f64::from(config.cores))
                * TICKS_PER_SERVICE_TIME_UNIT as f64,
            service_time_sampler: config.service_times.build_sampler(),
            connection_sampler,
            priorities: config.policy.class_priorities(),
            last_arrival_at: 0,
            arrival_rng: seeded_rng(config.seed, RNG_STREAM_ARRIVALS),
            service_rng: seeded_rng(config.seed, RNG_STREAM_SERVICES),
            hash_rng: seeded_rng(config.seed, RNG_STREAM_HASHES),
        }
    }

    #[inline]
    pub fn draw_request(&mut self) -> SimulatedRequest {
        self.last_arrival_at +=
            (draw_exponential(&mut self.arrival_rng) * self.mean_arrival_interval_ticks + 0.5) as Tick;
        let (class, work) = self.service_time_sampler.sample_class_and_time(&mut self.service_rng);
        let hash = self.hash_rng.next_u32();
        SimulatedRequest {
            arrived_at: self.last_arrival_at,
            service_time: work,
            request_hash: hash,
            flow_hash: self
                .connection_sampler
                .as_ref()
                .map_or(hash, |sampler| sampler.draw_connection_hash(&mut self.hash_rng)),
            connection_number: 0,
            class_index: class,
            service: self.priorities.service_of_class(class),
        }
    }
}

/// Sampler that draws the connection of each request. The i-th most frequent connection has a share proportional to 1 /
/// i^skew (Zipf).
#[derive(Debug)]
struct ConnectionSampler {
    /// Table for Walker's alias method (1977). A draw selects an entry, and then either its connection or its alias.
    entries: Vec<AliasTableEntry>,
}

#[derive(Debug, Clone, Copy)]
struct AliasTableEntry {
    /// Threshold below which a random 32-bit number selects the entry's connection. Any other number selects the alias.
    alias_threshold: u64,
    connection_hash: u32,
    alias_hash: u32,
}

impl ConnectionSampler {
    fn new(count: u32, skew: f64, rng: &mut Xoshiro256PlusPlus) -> Self {
        let weights: Vec<f64> = (1..=count).map(|rank| libm::pow(f64::from(rank), -skew)).collect();
        let total_weight: f64 = weights.iter().sum();
        let mut scaled_weights: Vec<f64> =
            weights.iter().map(|weight| weight / total_weight * f64::from(count)).collect();
        let connection_hashes: Vec<u32> = weights.iter().map(|_| rng.next_u32()).collect();
        let entry_without_alias =
            |hash: &u32| AliasTableEntry { alias_threshold: 1 << 32, connection_hash: *hash, alias_hash: *hash };
        let mut entries: Vec<AliasTableEntry> = connection_hashes.iter().map(entry_without_alias).collect();
        let (mut small, mut large): (Vec<usize>, Vec<usize>) =
            (0..scaled_weights.len()).partition(|i| scaled_weights[*i] < 1.0);
        while let (Some(small_index), Some(large_index)) = (small.pop(), large.last().copied()) {
            entries[small_index].alias_threshold = (scaled_weights[small_index] * f64::from(1u32 << 31) * 2.0) as u64;
            entries[small_index].alias_hash = connection_hashes[large_index];
            scaled_weights[large_index] -= 1.0 - scaled_weights[small_index];
            if scaled_weights[large_index] < 1.0 {
                large.pop();
                small.push(large_index);
            }
        }
        Self { entries }
    }

    fn draw_connection_hash(&self, rng: &mut Xoshiro256PlusPlus) -> u32 {
        let entry = self.entries[uniform_below(rng, self.entries.len() as u32) as usize];
        if u64::from(rng.next_u32()) < entry.alias_threshold { entry.connection_hash } else { entry.alias_hash }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn connections_have_zipf_request_shares() {
        let mut rng = seeded_rng(1, 0);
        let sampler = ConnectionSampler::new(4, 1.0, &mut rng);
        let mut count_by_connection: HashMap<u32, u32> = HashMap::new();
        (0..100_000).for_each(|_| *count_by_connection.entry(sampler.draw_connection_hash(&mut rng)).or_default() += 1);
        let mut counts: Vec<u32> = count_by_connection.into_values().collect();
        counts.sort_unstable();
        // The first connection has 1 / (1 + 1/2 + 1/3 + 1/4) = 0.48 of all requests.
        let expected_counts = [12_000, 16_000, 24_000, 48_000];
        assert!(
            counts.iter().zip(expected_counts).all(|(count, expected)| count.abs_diff(expected) < 600),
            "{counts:?}"
        );
    }
}
