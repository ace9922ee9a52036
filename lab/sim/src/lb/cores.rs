//! Cores that receive packets, which they either serve at once or queue up to a limit.

/// Maximum number of packets that wait while a core serves one, as in CrossRSS's FastClick queues (CoNEXT'20).
pub const MAX_QUEUED_PACKETS_PER_CORE: u32 = 128;

/// Allowed rounding error of a core's backlog, as a fraction of one packet's service time.
const PACKET_ROUNDING_TOLERANCE: f64 = 1e-6;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CorePacketCapacity {
    /// The core serves every packet at once, and each packet adds `packet_cost_ns` to its busy time.
    Unlimited {
        /// Busy time that a packet adds (ns).
        packet_cost_ns: f64,
    },
    /// The core serves its packets one after the other.
    Limited {
        /// Time that the core needs to serve a packet (ns), above 0.
        packet_cost_ns: f64,
        /// Maximum number of waiting packets, or `None` if unlimited.
        queue_limit: Option<u32>,
    },
}

/// Cores of all servers, with their packet counters since the start of the simulation.
#[derive(Debug, Clone)]
pub struct SimulatedCores {
    packet_cost_ns: f64,
    has_limited_capacity: bool,
    /// Longest waiting time for which a core still accepts an arriving packet (ns).
    max_wait_ns: f64,
    arrived_packet_counts: Vec<u64>,
    dropped_packet_counts: Vec<u64>,
    /// Time at which each core will have served all packets that it has accepted so far (ns).
    idle_from_ns_by_core: Vec<f64>,
    /// Number of bytes in all packets that the cores have accepted.
    accepted_bytes: u64,
}

impl SimulatedCores {
    pub fn new(cores: usize, capacity: CorePacketCapacity) -> Self {
        let (packet_cost_ns, has_limited_capacity, queue_limit) = match capacity {
            CorePacketCapacity::Unlimited { packet_cost_ns: cost_ns } => (cost_ns, false, None),
            CorePacketCapacity::Limited { packet_cost_ns: cost_ns, queue_limit } => (cost_ns, true, queue_limit),
        };
        let max_wait_ns = queue_limit
            .map_or(f64::INFINITY, |queue_limit| (f64::from(queue_limit) + PACKET_ROUNDING_TOLERANCE) * packet_cost_ns);
        Self {
            packet_cost_ns,
            has_limited_capacity,
            max_wait_ns,
            arrived_packet_counts: vec![0; cores],
            dropped_packet_counts: vec![0; cores],
            idle_from_ns_by_core: vec![0.0; cores],
            accepted_bytes: 0,
        }
    }

    /// Processes the arrival of a packet at a core. The arrival times of successive calls must not decrease.
    #[inline]
    pub fn process_arrival(&mut self, core: usize, time_ns: u64, bytes: u16) {
        self.arrived_packet_counts[core] += 1;
        if self.has_limited_capacity && !self.try_enqueue(core, time_ns) {
            return;
        }
        self.accepted_bytes += u64::from(bytes);
    }

    /// Queues a packet at a core. Returns `false` if the core drops it because the queue is full.
    fn try_enqueue(&mut self, core: usize, time_ns: u64) -> bool {
        let (arrival_ns, free_ns) = (time_ns as f64, &mut self.idle_from_ns_by_core[core]);
        // All packets take the same time, so the remaining work gives their number. The one in service does not wait.
        if *free_ns - arrival_ns > self.max_wait_ns {
            self.dropped_packet_counts[core] += 1;
            return false;
        }
        *free_ns = free_ns.max(arrival_ns) + self.packet_cost_ns;
        true
    }

    /// Returns the number of packets that have arrived at each core, including dropped ones.
    pub fn arrived_packet_counts(&self) -> &[u64] {
        &self.arrived_packet_counts
    }

    /// Returns the number of packets that all cores together have dropped.
    pub fn dropped_packet_count(&self) -> u64 {
        self.dropped_packet_counts.iter().sum()
    }

    /// Returns the number of bytes in the packets that the cores have accepted.
    pub fn accepted_bytes(&self) -> u64 {
        self.accepted_bytes
    }

    /// Returns the total service time of the packets that the core has accepted but not yet served (ns).
    fn core_backlog_ns(&self, core: usize, time_ns: u64) -> f64 {
        if self.has_limited_capacity { (self.idle_from_ns_by_core[core] - time_ns as f64).max(0.0) } else { 0.0 }
    }

    /// Returns the number of packets that each core has served by `time_ns`.
    pub fn served_packet_counts(&self, time_ns: u64) -> impl Iterator<Item = u64> {
        (0..self.arrived_packet_counts.len()).map(move |core| {
            let unserved_packet_count =
                (self.core_backlog_ns(core, time_ns) / self.packet_cost_ns - PACKET_ROUNDING_TOLERANCE).ceil().max(0.0)
                    as u64;
            self.arrived_packet_counts[core] - self.dropped_packet_counts[core] - unserved_packet_count
        })
    }

    /// Returns the time that each core has spent serving packets by `time_ns` (ns).
    pub fn core_busy_ns(&self, time_ns: u64) -> impl Iterator<Item = u64> {
        (0..self.arrived_packet_counts.len()).map(move |core| {
            let accepted_packet_count = (self.arrived_packet_counts[core] - self.dropped_packet_counts[core]) as f64;
            (accepted_packet_count * self.packet_cost_ns - self.core_backlog_ns(core, time_ns)) as u64
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use coreward_model::rss::{seeded_rng, uniform_below};

    use super::*;

    /// Reference model of a core, which stores the departure time of every queued packet.
    struct ReferenceCoreQueue {
        departure_times_ns: VecDeque<u64>,
        last_departure_ns: u64,
        served_packet_count: u64,
        dropped_packet_count: u64,
    }

    #[test]
    fn queue_length_in_time_matches_a_packet_queue() {
        let mut rng = seeded_rng(3, 77);
        let mut cores =
            SimulatedCores::new(1, CorePacketCapacity::Limited { packet_cost_ns: 50.0, queue_limit: Some(4) });
        let mut reference = ReferenceCoreQueue {
            departure_times_ns: VecDeque::new(),
            last_departure_ns: 0,
            served_packet_count: 0,
            dropped_packet_count: 0,
        };
        let mut now_ns = 0;
        for step in 0..20_000u64 {
            // Bursts and pauses alternate, with a mean load of 1.
            now_ns += u64::from(uniform_below(&mut rng, if step % 100 < 50 { 60 } else { 142 }));
            while reference.departure_times_ns.front().is_some_and(|departure| *departure <= now_ns) {
                reference.departure_times_ns.pop_front();
                reference.served_packet_count += 1;
            }
            // The queue holds one packet in service and four waiting ones.
            if reference.departure_times_ns.len() <= 4 {
                reference.last_departure_ns = reference.last_departure_ns.max(now_ns) + 50;
                reference.departure_times_ns.push_back(reference.last_departure_ns);
            } else {
                reference.dropped_packet_count += 1;
            }
            cores.process_arrival(0, now_ns, 100);
            assert_eq!(cores.dropped_packet_count(), reference.dropped_packet_count, "step {step}");
            assert_eq!(cores.served_packet_counts(now_ns).next(), Some(reference.served_packet_count), "step {step}");
        }
        assert!(reference.dropped_packet_count > 1_000 && reference.served_packet_count > 10_000);
        let accepted_packet_count = reference.served_packet_count + reference.departure_times_ns.len() as u64;
        assert_eq!(cores.accepted_bytes(), accepted_packet_count * 100);
        assert_eq!(
            cores.core_busy_ns(now_ns).next(),
            Some(accepted_packet_count * 50 - (reference.last_departure_ns - now_ns))
        );
    }

    #[test]
    fn unlimited_core_serves_every_packet_at_once() {
        let mut cores = SimulatedCores::new(2, CorePacketCapacity::Unlimited { packet_cost_ns: 1_000.0 });
        (0..500).for_each(|_| cores.process_arrival(1, 7, 60));
        assert_eq!(cores.served_packet_counts(7).collect::<Vec<_>>(), [0, 500]);
        assert_eq!(cores.core_busy_ns(7).collect::<Vec<_>>(), [0, 500_000]);
        assert_eq!((cores.dropped_packet_count(), cores.accepted_bytes()), (0, 30_000));
    }
}
