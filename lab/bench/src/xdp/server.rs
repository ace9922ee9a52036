//! Command `coreward-lab bench server`. It measures the cost of `server.bpf.c` per packet, above a tc program that does
//! nothing.

use std::fmt;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, ensure};
use coreward_dataplane::mmap_array::MmapArray;
use coreward_dataplane::server::ServerPrograms;
use coreward_dataplane::tc::PacketDirection;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{self, Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use libbpf_rs::MapHandle;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use nix::time::{ClockId, clock_gettime};
use rand::Rng as _;

use super::MeasurementLength;
use super::interleaved::{
    NsByRound, difference_of_fastest_rounds, differences_by_round, median_of_rounds, quartile_range_text,
};
use super::runner::{FrameTemplate, PACKET_COUNT, PacketVariation, run_generator, set_measured_program};
use super::workload::{
    IPV4_SERVICE_ADDRESS, IPV6_SERVICE_ADDRESS, ipv6_client_address, ipv6_request_frame_template,
    ipv6_response_frame_template, random_client_addresses, request_frame_template, response_frame_template,
};
use crate::report::{BenchReport, ReportTable};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/generated_segments.skel.rs"));
}

use skeleton::GeneratedSegmentsSkelBuilder;

/// Verdict of linux/pkt_cls.h that passes the packet on to the next program or the kernel.
const TC_ACT_UNSPEC: i32 = -1;

/// Kind of packets whose processing cost at a server is measured.
#[derive(Clone, Copy)]
struct ServerPacketCase {
    direction: PacketDirection,
    is_ipv6: bool,
    /// Whether the packets belong to a service. If so, the server's program changes and counts their timestamps.
    has_service: bool,
}

impl ServerPacketCase {
    const INGRESS: ServerPacketCase =
        ServerPacketCase { direction: PacketDirection::Ingress, is_ipv6: false, has_service: true };
    const EGRESS: ServerPacketCase = ServerPacketCase { direction: PacketDirection::Egress, ..Self::INGRESS };

    /// Returns all kinds of packets, in the order of the report.
    fn all_cases() -> impl Iterator<Item = ServerPacketCase> {
        [Self::INGRESS, Self::EGRESS].into_iter().flat_map(|case| {
            [case, ServerPacketCase { is_ipv6: true, ..case }, ServerPacketCase { has_service: false, ..case }]
        })
    }

    fn expected_counter(self) -> intf::server_counter {
        match self.direction {
            PacketDirection::Ingress => intf::SERVER_COUNTER_RESTORED,
            PacketDirection::Egress => intf::SERVER_COUNTER_STAMPED,
        }
    }

    fn frame_template(self) -> FrameTemplate {
        match (self.direction, self.is_ipv6) {
            (PacketDirection::Ingress, false) => request_frame_template(),
            (PacketDirection::Ingress, true) => ipv6_request_frame_template(),
            (PacketDirection::Egress, false) => response_frame_template(),
            (PacketDirection::Egress, true) => ipv6_response_frame_template(),
        }
    }

    fn service_address(self) -> SocketAddr {
        if self.is_ipv6 { IPV6_SERVICE_ADDRESS.into() } else { IPV4_SERVICE_ADDRESS.into() }
    }

    fn four_tuple(self, client: &SocketAddrV4) -> FourTuple {
        if self.is_ipv6 {
            FourTuple::ipv6((ipv6_client_address(*client.ip()), client.port()), IPV6_SERVICE_ADDRESS)
        } else {
            FourTuple::ipv4((*client.ip(), client.port()), IPV4_SERVICE_ADDRESS)
        }
    }
}

impl fmt::Display for ServerPacketCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (direction, change) = match self.direction {
            PacketDirection::Ingress => ("received", "TSecr restored"),
            PacketDirection::Egress => ("sent", "TSval stamped"),
        };
        if !self.has_service {
            return write!(f, "{direction}, of no service");
        }
        let family = if self.is_ipv6 { "IPv6, " } else { "" };
        write!(f, "{family}{direction}, {change}, {PACKET_COUNT} connections")
    }
}

/// Server's BPF programs, which are loaded without a network device and have one service.
struct LoadedServerPrograms {
    server_programs: ServerPrograms,
    cookie_keys: FleetCookieKeys,
    server_id: ServerId,
}

impl LoadedServerPrograms {
    /// Loads the programs with a service at the packets' address, or at another port if the case has no service.
    fn new(case: ServerPacketCase) -> anyhow::Result<Self> {
        let mut rng = seeded_rng(1, 0);
        let mut random_cookie_key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let cookie_keys = FleetCookieKeys {
            keys: [random_cookie_key(), random_cookie_key()],
            current_key_index: CookieKeyIndex::First,
        };
        let mut server_programs = ServerPrograms::load_unattached(false)?;
        // The first key applies from a time before the first packet.
        server_programs.set_cookie_keys(&cookie_keys, monotonic_now_ms()? - 1000);
        let server_id = ServerId::try_from(4711)?;
        let mut service_socket_address = case.service_address();
        if !case.has_service {
            service_socket_address.set_port(service_socket_address.port() + 1);
        }
        let service_address = ServiceAddress { vip_and_port: service_socket_address, protocol: TransportProtocol::Tcp };
        server_programs.set_services(&[(service_address, server_id, ServiceSettings::default())])?;
        Ok(Self { server_programs, cookie_keys, server_id })
    }

    fn packet_variations(&self, case: ServerPacketCase) -> anyhow::Result<Vec<PacketVariation>> {
        let now_ms = monotonic_now_ms()?;
        let packet_variation = |client: &SocketAddrV4| {
            let (tuple, cookie) = (case.four_tuple(client), Cookie::Server(self.server_id));
            let tsecr =
                cookie::stamp_tsval(&self.cookie_keys, &self.server_programs.time_key(), &tuple, cookie, now_ms);
            let mut port_bytes = [client.port().to_be_bytes(), IPV4_SERVICE_ADDRESS.1.to_be_bytes()];
            if matches!(case.direction, PacketDirection::Egress) {
                port_bytes.reverse();
            }
            PacketVariation {
                client_address: u32::from_ne_bytes(client.ip().octets()),
                ports: u32::from_ne_bytes(port_bytes.concat().try_into().expect("four bytes")),
                tsecr: tsecr.to_be(),
                line_index: 0,
            }
        };
        Ok(random_client_addresses(PACKET_COUNT).iter().map(packet_variation).collect())
    }

    fn changed_packet_count(&self, case: ServerPacketCase) -> u64 {
        self.server_programs.counter(case.expected_counter())
    }
}

/// Runner that generates packets from one frame, by the loaded programs of generated_segments.bpf.c.
struct SegmentPacketRunner {
    frame_bytes: Vec<u8>,
    generator_program: OwnedFd,
    empty_program: OwnedFd,
    parse_and_swap_program: OwnedFd,
    measured_program_map: MapHandle,
}

impl SegmentPacketRunner {
    fn new(case: ServerPacketCase, packets: &[PacketVariation]) -> anyhow::Result<Self> {
        ensure!(packets.len().is_power_of_two() && packets.len() <= PACKET_COUNT, "{} packets", packets.len());
        let frame = case.frame_template();
        let mut frame_bytes = frame.frame_bytes;
        // The destination is the loopback device's MAC address, so that the test run treats the packet as addressed to
        // this host.
        frame_bytes[..6].fill(0);
        let mut skeleton_storage = MaybeUninit::uninit();
        let mut opened_skeleton = GeneratedSegmentsSkelBuilder::default()
            .open(&mut skeleton_storage)
            .context("opening generated_segments.bpf.o")?;
        let bpf_constants =
            opened_skeleton.maps.rodata_data.as_deref_mut().context("generated_segments.bpf.o has no constants")?;
        bpf_constants.packet_index_mask = packets.len() as u32 - 1;
        bpf_constants.client_offset = frame.client_offset;
        bpf_constants.ports_offset = frame.ports_offset;
        bpf_constants.timestamp_offset = frame.tsecr_offset;
        let loaded_skeleton = opened_skeleton.load().context("loading generated_segments.bpf.c")?;
        let packet_memory: MmapArray<[PacketVariation; PACKET_COUNT]> =
            MmapArray::new(loaded_skeleton.maps.bss_packets.as_fd())?;
        packet_memory.write(0, packets);
        let generator_program = match case.direction {
            PacketDirection::Ingress => loaded_skeleton.progs.generated_request.as_fd().try_clone_to_owned()?,
            PacketDirection::Egress => loaded_skeleton.progs.generated_response.as_fd().try_clone_to_owned()?,
        };
        Ok(Self {
            frame_bytes,
            generator_program,
            empty_program: loaded_skeleton.progs.empty.as_fd().try_clone_to_owned()?,
            parse_and_swap_program: loaded_skeleton.progs.parse_and_swap_macs.as_fd().try_clone_to_owned()?,
            measured_program_map: MapHandle::try_from(&loaded_skeleton.maps.measured)?,
        })
    }

    /// Returns the mean time of `program` per packet (ns). Fails when the last verdict is not the expected one.
    fn measure_mean_packet_ns(&self, program: BorrowedFd<'_>, packet_count: u32) -> anyhow::Result<f64> {
        set_measured_program(&self.measured_program_map, program)?;
        let (mean_ns, tc_verdict) =
            run_generator(self.generator_program.as_fd(), &self.frame_bytes, packet_count, None)?;
        ensure!(tc_verdict == TC_ACT_UNSPEC, "the last packet's verdict was {tc_verdict}");
        Ok(mean_ns)
    }
}

struct ServerCostMeasurement {
    case: ServerPacketCase,
    empty_program_ns: NsByRound,
    parse_and_swap_ns: NsByRound,
    server_program_ns: NsByRound,
}

fn measure_server_case(case: ServerPacketCase, length: &MeasurementLength) -> anyhow::Result<ServerCostMeasurement> {
    let loaded_programs = LoadedServerPrograms::new(case)?;
    let runner = SegmentPacketRunner::new(case, &loaded_programs.packet_variations(case)?)?;
    let program = loaded_programs.server_programs.program_for_direction(case.direction);
    let (mut empty_ns, mut parse_and_swap_ns, mut server_ns) = (NsByRound::new(), NsByRound::new(), NsByRound::new());
    // The first round only warms branch predictors and caches and is not counted.
    for round in 0..=length.rounds {
        let baseline_results = [&runner.empty_program, &runner.parse_and_swap_program]
            .map(|baseline_program| runner.measure_mean_packet_ns(baseline_program.as_fd(), length.packets));
        let initial_changed_count = loaded_programs.changed_packet_count(case);
        let mean_ns = runner.measure_mean_packet_ns(program, length.packets)?;
        let changed_packets = loaded_programs.changed_packet_count(case) - initial_changed_count;
        let expected_changed_packet_count = if case.has_service { u64::from(length.packets) } else { 0 };
        ensure!(
            changed_packets == expected_changed_packet_count,
            "{case}: {changed_packets} packets were counted, expected {expected_changed_packet_count}"
        );
        let [empty_result, swap_result] = baseline_results;
        let (round_empty_ns, round_swap_ns) = (empty_result?, swap_result?);
        if round > 0 {
            empty_ns.push(round_empty_ns);
            parse_and_swap_ns.push(round_swap_ns);
            server_ns.push(mean_ns);
        }
    }
    Ok(ServerCostMeasurement { case, empty_program_ns: empty_ns, parse_and_swap_ns, server_program_ns: server_ns })
}

/// Measures the server's programs for all kinds of packets. Fails without the capabilities to load BPF programs, or
/// when a program does not do what the case expects.
pub fn run_server_bench(length: &MeasurementLength) -> anyhow::Result<BenchReport> {
    let mut table = ReportTable::new(&[
        "packet",
        "above empty, ns",
        "quartiles",
        "fastest rounds",
        "multiple of parse + swap",
        "empty, ns",
    ]);
    for case in ServerPacketCase::all_cases() {
        let measurement = measure_server_case(case, length).with_context(|| case.to_string())?;
        let ns_above_empty_program =
            differences_by_round(&measurement.server_program_ns, &measurement.empty_program_ns);
        let fastest_ns_above_empty_program =
            difference_of_fastest_rounds(&measurement.server_program_ns, &measurement.empty_program_ns);
        table.add_row([
            measurement.case.to_string().into(),
            median_of_rounds(&ns_above_empty_program).into(),
            quartile_range_text(&ns_above_empty_program).into(),
            fastest_ns_above_empty_program.into(),
            (fastest_ns_above_empty_program
                / difference_of_fastest_rounds(&measurement.parse_and_swap_ns, &measurement.empty_program_ns))
            .into(),
            median_of_rounds(&measurement.empty_program_ns).into(),
        ]);
    }
    let method = format!(
        "server.bpf.c runs at tc, on a fresh packet each time. Values are medians of {} interleaved rounds of {} \
         packets. `empty` returns at once, and `parse + swap MACs` is the floor, here at tc. The packets have no \
         socket. So the code for idle connections (PAWS clamp) and for the choice of a worker (steering) does not run.",
        length.rounds, length.packets,
    );
    Ok(BenchReport {
        name: "server",
        heading: "The server's programs",
        method_description: method,
        tables: vec![table],
    })
}

fn monotonic_now_ms() -> anyhow::Result<u32> {
    Ok(std::time::Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?).as_millis() as u32)
}
