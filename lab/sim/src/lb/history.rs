//! Load of the cores before the first packet: a trace's history has flows and rates, but no packets.

use super::cores::Capacity;

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
    offset: Vec<f64>,
    /// Packet rate of each flow (packets per ns).
    rate_of_flow: Vec<f64>,
    /// Last reading: its time (ns), and the packets and busy time of each core until then.
    read_ns: u64,
    packets: Vec<f64>,
    busy_ns: Vec<f64>,
}

impl HistoryLoad {
    pub fn new(cores: usize, capacity: Capacity, end_ns: u64) -> Self {
        let (cost_ns, is_limited) = match capacity {
            Capacity::Unlimited { cost_ns } => (cost_ns, false),
            Capacity::Limited { cost_ns, .. } => (cost_ns, true),
        };
        Self {
            cost_ns,
            is_limited,
            end_ns,
            packets_per_ns: vec![0.0; cores],
            offset: vec![0.0; cores],
            rate_of_flow: Vec::new(),
            read_ns: 0,
            packets: vec![0.0; cores],
            busy_ns: vec![0.0; cores],
        }
    }

    /// Starts a flow to a core with a rate of `rate_pps` packets per second.
    pub fn begin(&mut self, flow: u32, core: usize, rate: f64, now_ns: u64) {
        let flow = flow as usize;
        if self.rate_of_flow.len() <= flow {
            self.rate_of_flow.resize(flow + 1, 0.0);
        }
        self.rate_of_flow[flow] = rate / 1e9;
        self.add(core, rate / 1e9, now_ns);
    }

    pub fn end(&mut self, flow: u32, core: usize, now_ns: u64) {
        self.add(core, -self.rate_of_flow[flow as usize], now_ns);
    }

    fn add(&mut self, core: usize, slope: f64, now_ns: u64) {
        self.packets_per_ns[core] += slope;
        self.offset[core] -= slope * now_ns as f64;
    }

    /// Returns each core's busy time up to now, or to the history's end (ns). A core of limited capacity is busy for at
    /// most the elapsed time; the few packets in its queue are ignored.
    pub fn busy_ns(&mut self, now_ns: u64) -> &[f64] {
        let now_ns = now_ns.min(self.end_ns);
        let elapsed_ns = (now_ns - self.read_ns) as f64;
        if elapsed_ns > 0.0 {
            for core in 0..self.packets.len() {
                let packets = self.packets_per_ns[core] * now_ns as f64 + self.offset[core];
                let work_ns = ((packets - self.packets[core]) * self.cost_ns).max(0.0);
                self.busy_ns[core] += if self.is_limited { work_ns.min(elapsed_ns) } else { work_ns };
                self.packets[core] = packets;
            }
            self.read_ns = now_ns;
        }
        &self.busy_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_rate_times_time_and_ends_with_the_history() {
        let mut history = HistoryLoad::new(2, Capacity::Unlimited { cost_ns: 1_000.0 }, 3_000_000_000);
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
    fn core_load_is_at_most_one() {
        let mut history =
            HistoryLoad::new(1, Capacity::Limited { cost_ns: 10_000.0, queue_limit: None }, 2_000_000_000);
        history.begin(0, 0, 150_000.0, 0);
        assert_eq!(history.busy_ns(1_000_000_000)[0], 1e9);
    }
}
