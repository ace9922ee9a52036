//! Generator `campus`, which draws traffic like that of a university's uplink from a seed.
//!
//! Flows arrive as a Poisson process. The number of packets in a flow (its length) is drawn from a mixture. This
//! mixture was fitted to one hour on AGH University's uplink (6.5 million flows, 681 million packets). The source is
//! `length_distribution` of all flows in agh_2015061019_IPv4_anon (Jurkiewicz, "flow-models 2.0", SoftwareX 24 (2023)
//! 101506). A flow sends evenly spaced packets, the first one at its arrival. Its rate is lognormal with median 150
//! packets/s and sigma 1.3, but at least length / 300 s and at most 4,000 packets/s.
//!
//! With these limits of the rate, a flow has at most 1.2 million packets. Longer flows (1 of 240,000) are drawn again.
//! The mean length is then 106 (in the data 104.5, in the mixture without a limit 116). Flows over 57,000 packets carry
//! 47 % of all packets.
//!
//! A flow lasts at most 300 s. The arrivals of the 300 s before time 0 are therefore drawn too, and their remaining
//! packets are part of the trace. This makes the traffic stationary from its first packet on. Half of all packets
//! belong to flows that last minutes. A load balancer places a flow only once, so the time of this placement matters.
//! By default, the load balancer placed these flows when they arrived, and the history (flows and rates, without
//! packets) is part of the trace. With `history=0`, the load balancer starts at time 0 and places all of them at once,
//! before any core has reported a load.

use std::net::Ipv4Addr;
use std::str::FromStr;

use coreward_model::FourTuple;
use coreward_model::rss::{seeded_rng, uniform_below};
use rand::{Rng as _, RngExt as _};
use rand_distr::{Distribution as _, Exp1, LogNormal};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::traffic_settings::{TrafficSettingError, parse_settings};
use super::{FlowFirstPacket, PacketBatch, PacketTrace, TraceError, TraceFlowEvent, TracePacket};

/// Component of the mixture distribution of packets per flow. Parameters are those of SciPy with `loc` 0.
struct FlowLengthComponent {
    weight: f64,
    length_distribution: FlowLengthDistribution,
}

enum FlowLengthDistribution {
    /// Uniform distribution between 0 and this value.
    UniformUpTo(f64),
    /// Lognormal distribution, that is `scale` x exp(`s` x a standard normal number).
    Lognormal { s: f64, scale: f64 },
}

/// Distribution of the number of packets per flow, as a mixture of distributions (flow-models,
/// agh_2015061019_IPv4_anon, mixtures/all/length, Jurkiewicz 2023).
const FLOW_LENGTH_MIXTURE: [FlowLengthComponent; 10] = [
    FlowLengthComponent { weight: 0.2667839375411922, length_distribution: FlowLengthDistribution::UniformUpTo(1.0) },
    FlowLengthComponent { weight: 0.2498173937170916, length_distribution: FlowLengthDistribution::UniformUpTo(2.0) },
    FlowLengthComponent { weight: 0.07891291919980845, length_distribution: FlowLengthDistribution::UniformUpTo(3.0) },
    FlowLengthComponent { weight: 0.04500096756101436, length_distribution: FlowLengthDistribution::UniformUpTo(4.0) },
    FlowLengthComponent { weight: 0.01744045367227924, length_distribution: FlowLengthDistribution::UniformUpTo(5.0) },
    FlowLengthComponent { weight: 0.08315270229031899, length_distribution: FlowLengthDistribution::UniformUpTo(6.0) },
    FlowLengthComponent {
        weight: 0.1332450209694342,
        length_distribution: FlowLengthDistribution::Lognormal { s: 0.49364076506762783, scale: 7.379776617881778 },
    },
    FlowLengthComponent {
        weight: 0.07856960684414944,
        length_distribution: FlowLengthDistribution::Lognormal { s: 0.7294315551184803, scale: 20.034092933439634 },
    },
    FlowLengthComponent {
        weight: 0.0376312022303655,
        length_distribution: FlowLengthDistribution::Lognormal { s: 1.1885847327306296, scale: 107.16017390959571 },
    },
    FlowLengthComponent {
        weight: 0.009445795974345318,
        length_distribution: FlowLengthDistribution::Lognormal { s: 2.0387101598164863, scale: 1373.9749450320094 },
    },
];

/// Maximum duration of a flow (s).
const MAX_FLOW_SECONDS: f64 = 300.0;
/// Maximum rate of a flow (packets/s).
const MAX_FLOW_RATE_PPS: f64 = 4_000.0;
/// Median of the flows' log-normal rates (packets/s).
const MEDIAN_FLOW_RATE_PPS: f64 = 150.0;
/// Standard deviation of the natural logarithm of the flows' rates.
const FLOW_RATE_LOG_SIGMA: f64 = 1.3;
/// Maximum number of packets in a flow, which follows from the maximum duration and rate.
const MAX_FLOW_PACKETS: f64 = MAX_FLOW_SECONDS * MAX_FLOW_RATE_PPS;
/// Mean packet size in the measured hour of campus traffic (bytes), computed from 547 GB in 681 million packets.
const MEAN_PACKET_BYTES: u16 = 803;
/// Duration of each time slice, whose packets are drawn and sorted together (ns).
const TIME_SLICE_NS: u64 = 20_000_000;
/// Duration of each time slice in the history (ns). Slices are longer there because a flow has only two events, its
/// start and its end.
const HISTORY_SLICE_NS: u64 = 100_000_000;

/// Number of the random stream that [`seeded_rng`] uses for the campus traffic.
const RNG_STREAM_CAMPUS_TRAFFIC: u64 = 20;

/// Parameters of the campus traffic generator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CampusTrafficSettings {
    /// Seed of the traffic, or `None` if each run draws its traffic from the run's seed.
    pub seed: Option<u64>,
    /// Number of flows that arrive per second, from 1 to 1,000,000.
    pub flows_per_s: f64,
    /// Duration of the trace after its history (s), from 1 to 3,600.
    pub duration_s: u64,
    /// Duration of the history before the first packet (s), from 0 to 300. The load balancer already places flows in
    /// it.
    pub history_duration_s: u64,
}

impl Default for CampusTrafficSettings {
    fn default() -> Self {
        Self { seed: None, flows_per_s: 3_000.0, duration_s: 10, history_duration_s: MAX_FLOW_SECONDS as u64 }
    }
}

impl FromStr for CampusTrafficSettings {
    type Err = TrafficSettingError;

    /// Parses a text such as `seed=1,flows=3000,seconds=10,history=300`. Omitted settings have their default values.
    fn from_str(text: &str) -> Result<Self, TrafficSettingError> {
        let mut settings = Self::default();
        for setting in parse_settings("campus", text) {
            let setting = setting?;
            match setting.name {
                "seed" => settings.seed = Some(setting.parse_integer_in(0..=u64::MAX)?),
                "flows" => settings.flows_per_s = setting.parse_integer_in(1..=1_000_000)? as f64,
                "seconds" => settings.duration_s = setting.parse_integer_in(1..=3_600)?,
                "history" => settings.history_duration_s = setting.parse_integer_in(0..=MAX_FLOW_SECONDS as u64)?,
                _ => return Err(setting.build_unknown_name_error(&["seed", "flows", "seconds", "history"])),
            }
        }
        Ok(settings)
    }
}

/// Flow that has packets left to send. Its times are in ns after the start of the history.
pub(super) struct ActiveFlow {
    next_packet_at_ns: f64,
    packet_interval_ns: f64,
    remaining_packets: u32,
    flow_number: u32,
    is_new: bool,
    tuple: FourTuple,
}

impl ActiveFlow {
    pub fn new(flow_number: u32, first_packet_ns: f64, rate_pps: f64, packet_count: u32, tuple: FourTuple) -> Self {
        Self {
            next_packet_at_ns: first_packet_ns,
            packet_interval_ns: 1e9 / rate_pps,
            remaining_packets: packet_count,
            flow_number,
            is_new: true,
            tuple,
        }
    }

    fn first_packet(&self) -> FlowFirstPacket {
        FlowFirstPacket { tuple: self.tuple, flow_rate_pps: Some(1e9 / self.packet_interval_ns) }
    }

    /// Returns the time at which the flow ends, which is one interval after its last packet.
    fn end_ns(&self) -> f64 {
        self.next_packet_at_ns + f64::from(self.remaining_packets) * self.packet_interval_ns
    }
}

/// Campus traffic that is drawn from one seed.
pub struct CampusTrace {
    flow_generator: FlowGenerator,
    /// Time at which the next flow arrives (s after the end of the history).
    next_arrival_s: f64,
    mean_arrival_gap_s: f64,
    history_ns: u64,
    slice_start_ns: u64,
    end_ns: u64,
    active_flows: Vec<ActiveFlow>,
    /// Numbers of ended flows, which new flows can reuse.
    free_flow_numbers: Vec<u32>,
    next_flow_number: u32,
}

pub(super) type KeyedFirstPacket = ((u64, u32), FlowFirstPacket);

impl CampusTrace {
    /// Creates campus traffic with these settings. `seed` is used only if the settings contain no seed.
    pub fn new(settings: &CampusTrafficSettings, seed: u64) -> Self {
        let history_ns = settings.history_duration_s * 1_000_000_000;
        let mut trace = Self {
            flow_generator: FlowGenerator::new(settings.seed.unwrap_or(seed)),
            next_arrival_s: -MAX_FLOW_SECONDS,
            mean_arrival_gap_s: 1.0 / settings.flows_per_s,
            history_ns,
            slice_start_ns: 0,
            end_ns: history_ns + settings.duration_s * 1_000_000_000,
            active_flows: Vec::new(),
            free_flow_numbers: Vec::new(),
            next_flow_number: 0,
        };
        trace.add_flows_arriving_until(0);
        trace
    }

    /// Draws the flows that arrive before `until_ns` (ns after the start of the history).
    fn add_flows_arriving_until(&mut self, until_ns: u64) {
        let history_s = self.history_ns as f64 / 1e9;
        let until_s = until_ns as f64 / 1e9 - history_s;
        while self.next_arrival_s < until_s {
            let arrival_s = self.next_arrival_s;
            let unit_gap: f64 = Exp1.sample(&mut self.flow_generator.rng);
            self.next_arrival_s += unit_gap * self.mean_arrival_gap_s;
            let (length, rate) = (self.flow_generator.draw_packet_count(), self.flow_generator.draw_rate_pps());
            let rate = rate.max(length / MAX_FLOW_SECONDS);
            let tuple = self.flow_generator.draw_tuple();
            // These packets were sent before the trace and its history begin.
            let sent_packets = (-(arrival_s + history_s) * rate).ceil().max(0.0);
            if sent_packets >= length {
                continue;
            }
            let flow_number = self.free_flow_numbers.pop().unwrap_or_else(|| {
                self.next_flow_number += 1;
                self.next_flow_number - 1
            });
            let first_packet_ns = (arrival_s + history_s + sent_packets / rate) * 1e9;
            self.active_flows.push(ActiveFlow::new(
                flow_number,
                first_packet_ns,
                rate,
                (length - sent_packets) as u32,
                tuple,
            ));
        }
    }

    /// Reads the next slice of the history, which contains only the starts and ends of flows.
    fn read_history(&mut self, batch: &mut PacketBatch) {
        let until_ns = (self.slice_start_ns + HISTORY_SLICE_NS).min(self.history_ns);
        self.add_flows_arriving_until(until_ns);
        let mut first_packets = Vec::new();
        for flow in &mut self.active_flows {
            append_history_events(flow, until_ns as f64, &mut batch.packets, &mut first_packets);
        }
        self.finish_slice(batch, first_packets, until_ns);
        if until_ns == self.history_ns {
            self.active_flows.iter_mut().for_each(|flow| skip_history_packets(flow, until_ns as f64));
            self.active_flows.retain(|flow| flow.remaining_packets > 0);
        }
    }

    fn read_packets(&mut self, batch: &mut PacketBatch) {
        let until_ns = (self.slice_start_ns + TIME_SLICE_NS).min(self.end_ns);
        self.add_flows_arriving_until(until_ns);
        let mut first_packets = Vec::new();
        for flow in &mut self.active_flows {
            append_packets(flow, until_ns as f64, &mut batch.packets, &mut first_packets);
        }
        self.finish_slice(batch, first_packets, until_ns);
    }

    fn finish_slice(&mut self, batch: &mut PacketBatch, first_packets: Vec<KeyedFirstPacket>, until_ns: u64) {
        self.free_flow_numbers
            .extend(self.active_flows.extract_if(.., |flow| flow.remaining_packets == 0).map(|flow| flow.flow_number));
        sort_batch(batch, first_packets);
        self.slice_start_ns = until_ns;
    }
}

impl PacketTrace for CampusTrace {
    fn read(&mut self, batch: &mut PacketBatch) -> Result<(), TraceError> {
        batch.clear();
        // A slice may be empty, but an empty batch would signal the end of the trace.
        while batch.packets.is_empty() && self.slice_start_ns < self.end_ns {
            if self.slice_start_ns < self.history_ns {
                self.read_history(batch);
            } else {
                self.read_packets(batch);
            }
        }
        Ok(())
    }

    fn history_duration_ns(&self) -> u64 {
        self.history_ns
    }

    fn end_ns(&self) -> Option<u64> {
        Some(self.end_ns)
    }
}

/// Sorts the packets of a batch by time and flow number, and appends `first_packets` to the batch in this order.
pub(super) fn sort_batch(batch: &mut PacketBatch, mut first_packets: Vec<KeyedFirstPacket>) {
    // If a flow begins and ends in the same nanosecond, its begin comes first.
    batch.packets.sort_unstable_by_key(|packet| (packet.time_ns, packet.flow_number, packet.event.closes_flow()));
    first_packets.sort_unstable_by_key(|(key, _)| *key);
    batch.first_packets.extend(first_packets.into_iter().map(|(_, first_packet)| first_packet));
}

/// Appends the start and the end of a flow to the batch, if they are in the history and before `until_ns`.
fn append_history_events(
    flow: &mut ActiveFlow,
    until_ns: f64,
    events: &mut Vec<TracePacket>,
    first_packets: &mut Vec<KeyedFirstPacket>,
) {
    let build_event = |time_ns, event| TracePacket { time_ns, flow_number: flow.flow_number, wire_bytes: 0, event };
    if flow.is_new {
        let time_ns = flow.next_packet_at_ns as u64;
        first_packets.push(((time_ns, flow.flow_number), flow.first_packet()));
        events.push(build_event(time_ns, TraceFlowEvent::BEGINS_IN_HISTORY));
        flow.is_new = false;
    }
    if flow.end_ns() < until_ns {
        events.push(build_event(flow.end_ns() as u64, TraceFlowEvent::EXPIRES));
        flow.remaining_packets = 0;
    }
}

/// Skips the packets that the flow sends before `history_end_ns`, the end of the history.
fn skip_history_packets(flow: &mut ActiveFlow, history_end_ns: f64) {
    let sent_packets = ((history_end_ns - flow.next_packet_at_ns) / flow.packet_interval_ns)
        .ceil()
        .clamp(0.0, f64::from(flow.remaining_packets));
    flow.next_packet_at_ns += sent_packets * flow.packet_interval_ns;
    flow.remaining_packets -= sent_packets as u32;
}

/// Appends the packets that a flow sends before `until_ns` to the batch.
pub(super) fn append_packets(
    flow: &mut ActiveFlow,
    until_ns: f64,
    packets: &mut Vec<TracePacket>,
    first_packets: &mut Vec<KeyedFirstPacket>,
) {
    while flow.remaining_packets > 0 && flow.next_packet_at_ns < until_ns {
        let time_ns = flow.next_packet_at_ns as u64;
        let event = match (flow.is_new, flow.remaining_packets == 1) {
            (false, false) => TraceFlowEvent::NONE,
            (false, true) => TraceFlowEvent::CLOSES,
            (true, false) => TraceFlowEvent::OPENS,
            (true, true) => TraceFlowEvent::OPENS_AND_CLOSES,
        };
        if flow.is_new {
            first_packets.push(((time_ns, flow.flow_number), flow.first_packet()));
            flow.is_new = false;
        }
        packets.push(TracePacket { time_ns, flow_number: flow.flow_number, wire_bytes: MEAN_PACKET_BYTES, event });
        flow.next_packet_at_ns += flow.packet_interval_ns;
        flow.remaining_packets -= 1;
    }
}

/// Generator that draws the properties of random flows.
pub(super) struct FlowGenerator {
    rng: Xoshiro256PlusPlus,
    packet_rate_distribution: LogNormal<f64>,
    /// Components of the mixture of flow lengths, each with its cumulative weight and its distribution.
    flow_length_components: Vec<(f64, FlowLengthSampler)>,
}

enum FlowLengthSampler {
    UniformUpTo(f64),
    ScaledLognormal(f64, LogNormal<f64>),
}

impl FlowGenerator {
    pub fn new(seed: u64) -> Self {
        let mut cumulative_weight = 0.0;
        let mixture_components = FLOW_LENGTH_MIXTURE.iter().map(|component| {
            cumulative_weight += component.weight;
            let sampler = match component.length_distribution {
                FlowLengthDistribution::UniformUpTo(high) => FlowLengthSampler::UniformUpTo(high),
                FlowLengthDistribution::Lognormal { s, scale } => {
                    FlowLengthSampler::ScaledLognormal(scale, LogNormal::new(0.0, s).expect("a constant above 0"))
                }
            };
            (cumulative_weight, sampler)
        });
        let flow_length_components = mixture_components.collect();
        let packet_rate_distribution = LogNormal::new(0.0, FLOW_RATE_LOG_SIGMA).expect("a constant above 0");
        Self { rng: seeded_rng(seed, RNG_STREAM_CAMPUS_TRAFFIC), packet_rate_distribution, flow_length_components }
    }

    /// Draws a flow's number of packets, which is an integer from 1 to [`MAX_FLOW_PACKETS`].
    fn draw_packet_count(&mut self) -> f64 {
        loop {
            let (total_weight, _) = self.flow_length_components[self.flow_length_components.len() - 1];
            let drawn_weight = self.rng.random::<f64>() * total_weight;
            let component_index = self
                .flow_length_components
                .partition_point(|(cumulative_weight, _)| *cumulative_weight <= drawn_weight)
                .min(self.flow_length_components.len() - 1);
            let flow_length = match &self.flow_length_components[component_index].1 {
                FlowLengthSampler::UniformUpTo(high) => self.rng.random::<f64>() * high,
                FlowLengthSampler::ScaledLognormal(scale, lognormal) => scale * lognormal.sample(&mut self.rng),
            };
            if flow_length <= MAX_FLOW_PACKETS {
                return flow_length.ceil().max(1.0);
            }
        }
    }

    /// Draws a flow's rate (packets/s), independently of its number of packets.
    pub fn draw_rate_pps(&mut self) -> f64 {
        (MEDIAN_FLOW_RATE_PPS * self.packet_rate_distribution.sample(&mut self.rng)).min(MAX_FLOW_RATE_PPS)
    }

    /// Draws a number from 0 (inclusive) to 1 (exclusive), uniformly distributed.
    pub fn draw_uniform(&mut self) -> f64 {
        self.rng.random()
    }

    /// Draws the 4-tuple of a random client that connects to the only service.
    pub fn draw_tuple(&mut self) -> FourTuple {
        let client = Ipv4Addr::from_bits(self.rng.next_u32());
        let port = 1_024 + uniform_below(&mut self.rng, 64_512) as u16;
        FourTuple::ipv4((client, port), (Ipv4Addr::new(10, 200, 0, 1), 443))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flow_lengths_follow_the_published_distribution() {
        let mut flow_generator = FlowGenerator::new(1);
        let lengths: Vec<f64> = (0..4_000_000).map(|_| flow_generator.draw_packet_count()).collect();
        let total_packets: f64 = lengths.iter().sum();
        let mean = total_packets / lengths.len() as f64;
        let elephant_packet_fraction = lengths.iter().filter(|length| **length > 57_000.0).sum::<f64>() / total_packets;
        let single_packet_flow_fraction =
            lengths.iter().filter(|length| **length == 1.0).count() as f64 / lengths.len() as f64;
        // The 4 million draws have a deviation of about 4,000, so the standard error of the mean is 2 %.
        assert!((99.0..113.0).contains(&mean), "mean {mean}");
        assert!(
            (0.42..0.53).contains(&elephant_packet_fraction),
            "{elephant_packet_fraction} of the packets in flows over 57,000"
        );
        // 0.2668 + 0.2498 / 2 + 0.0789 / 3 + 0.0450 / 4 + 0.0174 / 5 + 0.0832 / 6, and a few of the lognormal ones.
        assert!((single_packet_flow_fraction - 0.4467).abs() < 0.002, "{single_packet_flow_fraction}");
    }

    #[test]
    fn traffic_is_stationary_from_the_first_second() {
        let mut packets_per_second = [0.0; 6];
        let seed_count = 12;
        for seed in 1..=seed_count {
            let mut trace = CampusTrace::new(
                &CampusTrafficSettings { duration_s: 6, history_duration_s: 0, ..CampusTrafficSettings::default() },
                seed,
            );
            let mut batch = PacketBatch::default();
            loop {
                trace.read(&mut batch).unwrap();
                if batch.packets.is_empty() {
                    break;
                }
                batch
                    .packets
                    .iter()
                    .for_each(|packet| packets_per_second[(packet.time_ns / 1_000_000_000) as usize] += 1.0);
            }
        }
        // 3,000 flows with 106 packets each arrive per second. Long flows make the seeds' rates differ by 5 %.
        for packets in packets_per_second.map(|packets| packets / f64::from(seed_count as u32)) {
            assert!((290_000.0..350_000.0).contains(&packets), "{packets_per_second:?}");
        }
        assert!((packets_per_second[0] / packets_per_second[5] - 1.0).abs() < 0.05, "{packets_per_second:?}");
    }

    /// Returns the number of packets, the number of started flows, the number of flows that are open at the first
    /// packet, and the highest flow number.
    fn check_trace_and_count_flows(campus: CampusTrafficSettings) -> (u64, usize, usize, u32) {
        let mut trace = CampusTrace::new(&campus, 1);
        let (mut batch, mut last_ns, mut open_flows) = (PacketBatch::default(), 0, std::collections::HashSet::new());
        let (mut packets, mut opened_flow_count, mut ongoing_flow_count, mut max_flow_number) = (0, 0, 0, 0);
        loop {
            trace.read(&mut batch).unwrap();
            if batch.packets.is_empty() {
                break;
            }
            let mut first_packets = batch.first_packets.iter();
            for packet in &batch.packets {
                assert!(packet.time_ns >= last_ns);
                assert_eq!(packet.event.has_packet(), packet.time_ns >= trace.history_duration_ns());
                last_ns = packet.time_ns;
                if packet.event.has_packet() && packets == 0 {
                    ongoing_flow_count = open_flows.len();
                }
                if packet.event.opens_flow() {
                    assert!(open_flows.insert(packet.flow_number) && first_packets.next().is_some());
                    opened_flow_count += 1;
                }
                assert!(open_flows.contains(&packet.flow_number), "{packet:?}");
                if packet.event.closes_flow() {
                    open_flows.remove(&packet.flow_number);
                }
                packets += u64::from(packet.event.has_packet());
                max_flow_number = max_flow_number.max(packet.flow_number);
            }
            assert!(first_packets.next().is_none());
        }
        assert!(last_ns < trace.end_ns().unwrap());
        (packets, opened_flow_count, ongoing_flow_count, max_flow_number)
    }

    #[test]
    fn packets_are_in_order_and_flows_open_and_close_once() {
        let campus = CampusTrafficSettings { flows_per_s: 200.0, duration_s: 3, history_duration_s: 0, seed: Some(4) };
        let (cold_packets, opened_flow_count, ongoing_flow_count, max_flow_number) =
            check_trace_and_count_flows(campus);
        assert!(
            cold_packets > 10_000
                && (600..900).contains(&opened_flow_count)
                && ongoing_flow_count == 0
                && max_flow_number < 900,
            "{cold_packets} {opened_flow_count}"
        );
        let (packets, opened_flow_count, ongoing_flow_count, max_flow_number) =
            check_trace_and_count_flows(CampusTrafficSettings { history_duration_s: 300, ..campus });
        // The flows are the same, and only their placement differs. A packet at time 0 may be rounded to either side.
        assert!(packets.abs_diff(cold_packets) <= 2, "{packets} and {cold_packets} packets");
        assert!(
            (58_000..63_000).contains(&opened_flow_count)
                && (80..200).contains(&ongoing_flow_count)
                && max_flow_number < 900,
            "{ongoing_flow_count}"
        );
    }

    #[test]
    fn settings_are_parsed_and_invalid_settings_are_rejected() {
        assert_eq!("".parse(), Ok(CampusTrafficSettings::default()));
        assert_eq!(
            "seed=7,seconds=3,history=0".parse(),
            Ok(CampusTrafficSettings {
                seed: Some(7),
                duration_s: 3,
                history_duration_s: 0,
                ..CampusTrafficSettings::default()
            })
        );
        let parsing_error_text = |text: &str| text.parse::<CampusTrafficSettings>().unwrap_err().to_string();
        assert_eq!(parsing_error_text("seconds=0"), "campus: seconds=0: expected a whole number from 1 to 3600");
        assert!(parsing_error_text("flow=3").contains("did you mean flows?"));
        assert!(parsing_error_text("flows").contains("expected name=value"));
    }
}
