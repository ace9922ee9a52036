//! Generator `burst`, whose connections all open within 100 ms, which is faster than any report.
//!
//! The fleet is idle for the half second before, and its reports show this. Each connection sends evenly spaced packets
//! until the trace ends. Its rate has the same distribution as in [`super::campus`] (lognormal, median 150 packets/s,
//! sigma 1.3, at most 4,000).

use std::str::FromStr;

use super::campus::{ActiveFlow, FlowGenerator, KeyedFirstPacket, append_packets, sort_batch};
use super::traffic_settings::{TrafficSettingError, parse_settings};
use super::{PacketBatch, PacketTrace, TraceError};

/// Start of the burst (ns after the trace's start). It is within the first window, which is not measured.
const BURST_START_NS: u64 = 500_000_000;
/// Duration of the burst (ns).
const BURST_DURATION_NS: u64 = 100_000_000;
/// Duration of each time slice, whose packets are drawn and sorted together (ns).
const TIME_SLICE_NS: u64 = 20_000_000;

/// Parameters of the generator of traffic with a burst of new connections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BurstTrafficSettings {
    /// Seed of the traffic, or `None` if each run draws its traffic from the run's seed.
    pub seed: Option<u64>,
    /// Number of connections, from 1 to 1,000,000.
    pub connection_count: u32,
    /// Duration of the trace (s), from 2 to 3,600.
    pub duration_s: u64,
}

impl Default for BurstTrafficSettings {
    fn default() -> Self {
        Self { seed: None, connection_count: 1_000, duration_s: 5 }
    }
}

impl FromStr for BurstTrafficSettings {
    type Err = TrafficSettingError;

    /// Parses a text such as `seed=1,connections=1000,seconds=5`. Omitted settings have their default values.
    fn from_str(text: &str) -> Result<Self, TrafficSettingError> {
        let mut settings = Self::default();
        for setting in parse_settings("burst", text) {
            let setting = setting?;
            match setting.name {
                "seed" => settings.seed = Some(setting.parse_integer_in(0..=u64::MAX)?),
                "connections" => settings.connection_count = setting.parse_integer_in(1..=1_000_000)? as u32,
                "seconds" => settings.duration_s = setting.parse_integer_in(2..=3_600)?,
                _ => return Err(setting.build_unknown_name_error(&["seed", "connections", "seconds"])),
            }
        }
        Ok(settings)
    }
}

/// Traffic with a burst of new connections, drawn from one seed.
pub struct BurstTrace {
    active_flows: Vec<ActiveFlow>,
    slice_start_ns: u64,
    end_ns: u64,
}

impl BurstTrace {
    /// Creates burst traffic with these settings. `seed` is used only if the settings contain no seed.
    pub fn new(settings: &BurstTrafficSettings, seed: u64) -> Self {
        let mut flow_generator = FlowGenerator::new(settings.seed.unwrap_or(seed));
        let end_ns = settings.duration_s * 1_000_000_000;
        let active_flows = (0..settings.connection_count).map(|number| {
            let start_ns = BURST_START_NS as f64 + flow_generator.draw_uniform() * BURST_DURATION_NS as f64;
            let rate_pps = flow_generator.draw_rate_pps();
            // The connection cannot send that many packets until the end.
            let packet_count = rate_pps * end_ns as f64 / 1e9 + 1.0;
            ActiveFlow::new(number, start_ns, rate_pps, packet_count as u32, flow_generator.draw_tuple())
        });
        Self { active_flows: active_flows.collect(), slice_start_ns: 0, end_ns }
    }
}

impl PacketTrace for BurstTrace {
    fn read(&mut self, batch: &mut PacketBatch) -> Result<(), TraceError> {
        batch.clear();
        while batch.packets.is_empty() && self.slice_start_ns < self.end_ns {
            let until_ns = (self.slice_start_ns + TIME_SLICE_NS).min(self.end_ns);
            let mut first_packets: Vec<KeyedFirstPacket> = Vec::new();
            for flow in &mut self.active_flows {
                append_packets(flow, until_ns as f64, &mut batch.packets, &mut first_packets);
            }
            sort_batch(batch, first_packets);
            self.slice_start_ns = until_ns;
        }
        Ok(())
    }

    fn end_ns(&self) -> Option<u64> {
        Some(self.end_ns)
    }
}
