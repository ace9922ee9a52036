//! Load of the cores before the first packet: a trace's history has flows and rates, but no packets.

use super::cores::CoreCapacity;

/// Work of every core in the trace's history. Between two events a core's number of packets is linear in time, so it is
/// kept as a slope and an offset.
#[derive(Debug)]
pub struct HistoryLoad {
    cost_ns: f64,
    is_limited: bool,
    end_ns: u64,
    /// Packet rate of each core (packets per ns), the slope.
    packets_per_ns: Vec<f64>,
    /// Number of packets of each core that the linear function gives for time 0, the offset.
    packets_at_time_zero: Vec<f64>,
    /// Packet rate of each flow (packets per ns).
    flow_packets_per_ns: Vec<f64>,
    /// Last reading: its time (ns), and the packets and busy time of each core until then.
    last_read_ns: u64,
    last_packets: Vec<f64>,
    busy_ns: Vec<f64>,
}

impl HistoryLoad {
    pub fn new(cores: usize, capacity: CoreCapacity, end_ns: u64) -> Self {
        let (cost_ns, is_limited) = match capacity {
            CoreCapacity::Unlimited { cost_ns } => (cost_ns, false),
            CoreCapacity::Limited { cost_ns, .. } => (cost_ns, true),
        };
        Self {
            cost_ns,
            is_limited,
            end_ns,
            packets_per_ns: vec![0.0; cores],
            packets_at_time_zero: vec![0.0; cores],
            flow_packets_per_ns: Vec::new(),
            last_read_ns: 0,
            last_packets: vec![0.0; cores],
            busy_ns: vec![0.0; cores],
        }
    }

    /// Starts a flow to a core with a rate of `rate_pps` packets per second.
    pub fn begin(&mut self, flow: u32, core: usize, rate_pps: f64, now_ns: u64) {
        let flow = flow as usize;
        if self.flow_packets_per_ns.len() <= flow {
            self.flow_packets_per_ns.resize(flow + 1, 0.0);
        }
        self.flow_packets_per_ns[flow] = rate_pps / 1e9;
        self.add_rate(core, rate_pps / 1e9, now_ns);
    }

    pub fn end(&mut self, flow: u32, core: usize, now_ns: u64) {
        self.add_rate(core, -self.flow_packets_per_ns[flow as usize], now_ns);
    }

    fn add_rate(&mut self, core: usize, packets_per_ns: f64, now_ns: u64) {
        self.packets_per_ns[core] += packets_per_ns;
        self.packets_at_time_zero[core] -= packets_per_ns * now_ns as f64;
    }

    /// Returns each core's busy time up to now, or to the history's end (ns). A core of limited capacity is busy for at
    /// most the elapsed time; the few packets in its queue are ignored.
    pub fn busy_ns(&mut self, now_ns: u64) -> &[f64] {
        let now_ns = now_ns.min(self.end_ns);
        let elapsed_ns = (now_ns - self.last_read_ns) as f64;
        if elapsed_ns > 0.0 {
            for core in 0..self.last_packets.len() {
                let packets = self.packets_per_ns[core] * now_ns as f64 + self.packets_at_time_zero[core];
                let work_ns = ((packets - self.last_packets[core]) * self.cost_ns).max(0.0);
                self.busy_ns[core] += if self.is_limited { work_ns.min(elapsed_ns) } else { work_ns };
                self.last_packets[core] = packets;
            }
            self.last_read_ns = now_ns;
        }
        &self.busy_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_rate_times_time_and_ends_with_the_history() {
        let mut history = HistoryLoad::new(2, CoreCapacity::Unlimited { cost_ns: 1_000.0 }, 3_000_000_000);
        history.begin(0, 1, 500.0, 0);
        history.begin(7, 1, 100.0, 500_000_000);
        // 500 packets of 1 us in one flow, 50 in the other.
        assert!((history.busy_ns(1_000_000_000)[1] - 550_000.0).abs() < 1.0);
        history.end(0, 1, 1_500_000_000);
        // 250 and 100 more packets, then 100.
        assert!((history.busy_ns(2_000_000_000)[1] - 900_000.0).abs() < 1.0);
        assert!((history.busy_ns(9_000_000_000)[1] - 1_000_000.0).abs() < 1.0);
        assert!((history.busy_ns(9_500_000_000)[1] - 1_000_000.0).abs() < 1.0);
        assert_eq!(history.busy_ns(9_500_000_000)[0], 0.0);
    }

    #[test]
    fn core_of_limited_capacity_is_busy_at_most_all_the_time() {
        let mut history =
            HistoryLoad::new(1, CoreCapacity::Limited { cost_ns: 10_000.0, queue_limit: None }, 2_000_000_000);
        history.begin(0, 0, 150_000.0, 0);
        assert_eq!(history.busy_ns(1_000_000_000)[0], 1e9);
    }
}
