//! Load on the cores before a trace's first packet, from earlier flows of which only the rates are known.

use super::cores::CorePacketCapacity;

/// Packets and busy time of each core during the trace's history, which is the time before its first packet. Flow rates
/// only change when a flow starts or ends. Between these events, a core's packet count is a linear function of time,
/// stored as slope and offset.
#[derive(Debug)]
pub struct TraceHistoryLoad {
    packet_cost_ns: f64,
    has_limited_capacity: bool,
    history_end_ns: u64,
    /// Slope of each core's linear function, which is its packet rate (packets per ns).
    core_packets_per_ns: Vec<f64>,
    /// Offset of each core's linear function, which is its packet count extrapolated to time 0.
    core_packets_at_time_zero: Vec<f64>,
    /// Packet rate of each flow (packets per ns).
    flow_packets_per_ns: Vec<f64>,
    /// Time of the last call of [`Self::core_busy_ns`] (ns).
    last_read_ns: u64,
    /// Packet count of each core at the last call of [`Self::core_busy_ns`].
    last_read_core_packets: Vec<f64>,
    core_busy_ns: Vec<f64>,
}

impl TraceHistoryLoad {
    pub fn new(cores: usize, capacity: CorePacketCapacity, history_end_ns: u64) -> Self {
        let (packet_cost_ns, has_limited_capacity) = match capacity {
            CorePacketCapacity::Unlimited { packet_cost_ns: cost_ns } => (cost_ns, false),
            CorePacketCapacity::Limited { packet_cost_ns: cost_ns, .. } => (cost_ns, true),
        };
        Self {
            packet_cost_ns,
            has_limited_capacity,
            history_end_ns,
            core_packets_per_ns: vec![0.0; cores],
            core_packets_at_time_zero: vec![0.0; cores],
            flow_packets_per_ns: Vec::new(),
            last_read_ns: 0,
            last_read_core_packets: vec![0.0; cores],
            core_busy_ns: vec![0.0; cores],
        }
    }

    /// Starts a flow that sends `rate_pps` packets per second to a core.
    pub fn begin_flow(&mut self, flow: u32, core: usize, rate_pps: f64, now_ns: u64) {
        let flow = flow as usize;
        if self.flow_packets_per_ns.len() <= flow {
            self.flow_packets_per_ns.resize(flow + 1, 0.0);
        }
        self.flow_packets_per_ns[flow] = rate_pps / 1e9;
        self.add_core_rate(core, rate_pps / 1e9, now_ns);
    }

    pub fn end_flow(&mut self, flow: u32, core: usize, now_ns: u64) {
        self.add_core_rate(core, -self.flow_packets_per_ns[flow as usize], now_ns);
    }

    fn add_core_rate(&mut self, core: usize, packets_per_ns: f64, now_ns: u64) {
        self.core_packets_per_ns[core] += packets_per_ns;
        self.core_packets_at_time_zero[core] -= packets_per_ns * now_ns as f64;
    }

    /// Returns each core's busy time until now, or until the end of the history if that is earlier (ns). A core of
    /// limited capacity is at most busy for the elapsed time, and the few packets in its queue are ignored.
    pub fn core_busy_ns(&mut self, now_ns: u64) -> &[f64] {
        let now_ns = now_ns.min(self.history_end_ns);
        let elapsed_ns = (now_ns - self.last_read_ns) as f64;
        if elapsed_ns > 0.0 {
            for core in 0..self.last_read_core_packets.len() {
                let packet_count =
                    self.core_packets_per_ns[core] * now_ns as f64 + self.core_packets_at_time_zero[core];
                let work_ns = ((packet_count - self.last_read_core_packets[core]) * self.packet_cost_ns).max(0.0);
                self.core_busy_ns[core] += if self.has_limited_capacity { work_ns.min(elapsed_ns) } else { work_ns };
                self.last_read_core_packets[core] = packet_count;
            }
            self.last_read_ns = now_ns;
        }
        &self.core_busy_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_rate_times_time_and_ends_with_the_history() {
        let mut history =
            TraceHistoryLoad::new(2, CorePacketCapacity::Unlimited { packet_cost_ns: 1_000.0 }, 3_000_000_000);
        history.begin_flow(0, 1, 500.0, 0);
        history.begin_flow(7, 1, 100.0, 500_000_000);
        // One flow sends 500 packets of 1 us, the other 50.
        assert!((history.core_busy_ns(1_000_000_000)[1] - 550_000.0).abs() < 1.0);
        history.end_flow(0, 1, 1_500_000_000);
        // By 2 s the flows have sent another 250 and 100 packets. The second sends 100 more until the history ends.
        assert!((history.core_busy_ns(2_000_000_000)[1] - 900_000.0).abs() < 1.0);
        assert!((history.core_busy_ns(9_000_000_000)[1] - 1_000_000.0).abs() < 1.0);
        assert!((history.core_busy_ns(9_500_000_000)[1] - 1_000_000.0).abs() < 1.0);
        assert_eq!(history.core_busy_ns(9_500_000_000)[0], 0.0);
    }

    #[test]
    fn core_of_limited_capacity_is_busy_at_most_the_elapsed_time() {
        let mut history = TraceHistoryLoad::new(
            1,
            CorePacketCapacity::Limited { packet_cost_ns: 10_000.0, queue_limit: None },
            2_000_000_000,
        );
        history.begin_flow(0, 0, 150_000.0, 0);
        assert_eq!(history.core_busy_ns(1_000_000_000)[0], 1e9);
    }
}
