//! `coreward-lab bench server`: cost of `server.bpf.c` per packet, above a tc program that does nothing.

use std::fmt;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, ensure};
use coreward_dataplane::mmap_array::MmapArray;
use coreward_dataplane::server::ServerPrograms;
use coreward_dataplane::tc::Direction;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use libbpf_rs::MapHandle;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use nix::time::{ClockId, clock_gettime};
use rand::Rng as _;

use super::MeasurementLength;
use super::interleaved::{RoundTimes, difference, fastest_difference, median_of, quartiles};
use super::runner::{Frame, PACKET_COUNT, Packet, choose, run_feed};
use super::workload::{VIP, VIP_IPV6, client_ipv6, clients, request, request_ipv6, response, response_ipv6};
use crate::report::{Report, Table};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/generated_segments.skel.rs"));
}

use skeleton::GeneratedSegmentsSkelBuilder;

/// Verdict of linux/pkt_cls.h that passes the packet on to the next program
const TC_ACT_UNSPEC: i32 = -1;

/// Kind of packets whose cost is measured.
#[derive(Clone, Copy)]
struct Case {
    direction: Direction,
    is_ipv6: bool,
    /// Whether the packets belong to a service. If so, the program changes and counts their timestamps.
    has_service: bool,
}

impl Case {
    const INGRESS: Case = Case { direction: Direction::Ingress, is_ipv6: false, has_service: true };
    const EGRESS: Case = Case { direction: Direction::Egress, ..Self::INGRESS };

    /// Returns all kinds of packets, in the order of the report.
    fn all() -> impl Iterator<Item = Case> {
        [Self::INGRESS, Self::EGRESS]
            .into_iter()
            .flat_map(|case| [case, Case { is_ipv6: true, ..case }, Case { has_service: false, ..case }])
    }

    fn counter(self) -> intf::server_counter {
        match self.direction {
            Direction::Ingress => intf::SERVER_COUNTER_RESTORED,
            Direction::Egress => intf::SERVER_COUNTER_STAMPED,
        }
    }

    fn frame(self) -> Frame {
        match (self.direction, self.is_ipv6) {
            (Direction::Ingress, false) => request(),
            (Direction::Ingress, true) => request_ipv6(),
            (Direction::Egress, false) => response(),
            (Direction::Egress, true) => response_ipv6(),
        }
    }

    fn vip(self) -> SocketAddr {
        if self.is_ipv6 { VIP_IPV6.into() } else { VIP.into() }
    }

    fn tuple(self, client: &SocketAddrV4) -> FourTuple {
        if self.is_ipv6 {
            FourTuple::ipv6((client_ipv6(*client.ip()), client.port()), VIP_IPV6)
        } else {
            FourTuple::ipv4((*client.ip(), client.port()), VIP)
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (direction, change) = match self.direction {
            Direction::Ingress => ("received", "TSecr restored"),
            Direction::Egress => ("sent", "TSval stamped"),
        };
        if !self.has_service {
            return write!(f, "{direction}, of no service");
        }
        let family = if self.is_ipv6 { "IPv6, " } else { "" };
        write!(f, "{family}{direction}, {change}, {PACKET_COUNT} connections")
    }
}

/// Loaded programs of a server, with one service.
struct Server {
    programs: ServerPrograms,
    keys: FleetKeys,
    id: ServerId,
}

impl Server {
    /// Loads the programs with a service at the packets' address, or at another port for a case without a service.
    fn new(case: Case) -> anyhow::Result<Self> {
        let mut rng = seeded_rng(1, 0);
        let mut key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let keys = FleetKeys { keys: [key(), key()], current: KeyIndex::First };
        let mut programs = ServerPrograms::load_only(false)?;
        // The first key stamps from a time before the first packet.
        programs.set_keys(&keys, now_ms()? - 1000);
        let id = ServerId::try_from(4711)?;
        let mut socket = case.vip();
        if !case.has_service {
            socket.set_port(socket.port() + 1);
        }
        let address = ServiceAddress { socket, protocol: Protocol::Tcp };
        programs.set_services(&[(address, id, ServiceMode::default())])?;
        Ok(Self { programs, keys, id })
    }

    fn packets(&self, case: Case) -> anyhow::Result<Vec<Packet>> {
        let milliseconds = now_ms()?;
        let packet = |client: &SocketAddrV4| {
            let (tuple, cookie) = (case.tuple(client), Cookie::Server(self.id));
            let tsecr = cookie::stamp_tsval(&self.keys, &self.programs.time_key(), &tuple, cookie, milliseconds);
            let mut ports = [client.port().to_be_bytes(), VIP.1.to_be_bytes()];
            if matches!(case.direction, Direction::Egress) {
                ports.reverse();
            }
            Packet {
                client_address: u32::from_ne_bytes(client.ip().octets()),
                ports: u32::from_ne_bytes(ports.concat().try_into().expect("four bytes")),
                tsecr: tsecr.to_be(),
                line_index: 0,
            }
        };
        Ok(clients(PACKET_COUNT).iter().map(packet).collect())
    }

    fn counted(&self, case: Case) -> u64 {
        self.programs.counter(case.counter())
    }
}

/// Loaded programs of generated_segments.bpf.c, which generate packets from one frame.
struct Runner {
    frame: Vec<u8>,
    feed: OwnedFd,
    empty: OwnedFd,
    parse_and_swap_macs: OwnedFd,
    measured: MapHandle,
}

impl Runner {
    fn new(case: Case, packets: &[Packet]) -> anyhow::Result<Self> {
        ensure!(packets.len().is_power_of_two() && packets.len() <= PACKET_COUNT, "{} packets", packets.len());
        let frame = case.frame();
        let mut bytes = frame.bytes;
        // MAC address of the loopback device, so that the test run treats the packet as addressed to this host.
        bytes[..6].fill(0);
        let mut storage = MaybeUninit::uninit();
        let mut open =
            GeneratedSegmentsSkelBuilder::default().open(&mut storage).context("opening generated_segments.bpf.o")?;
        let constants = open.maps.rodata_data.as_deref_mut().context("generated_segments.bpf.o has no constants")?;
        constants.packet_index_mask = packets.len() as u32 - 1;
        constants.client_offset = frame.client_offset;
        constants.ports_offset = frame.ports_offset;
        constants.timestamp_offset = frame.tsecr_offset;
        let loaded = open.load().context("loading generated_segments.bpf.c")?;
        let memory: MmapArray<[Packet; PACKET_COUNT]> = MmapArray::new(loaded.maps.bss_packets.as_fd())?;
        memory.write(0, packets);
        let feed = match case.direction {
            Direction::Ingress => loaded.progs.generated_request.as_fd().try_clone_to_owned()?,
            Direction::Egress => loaded.progs.generated_response.as_fd().try_clone_to_owned()?,
        };
        Ok(Self {
            frame: bytes,
            feed,
            empty: loaded.progs.empty.as_fd().try_clone_to_owned()?,
            parse_and_swap_macs: loaded.progs.parse_and_swap_macs.as_fd().try_clone_to_owned()?,
            measured: MapHandle::try_from(&loaded.maps.measured)?,
        })
    }

    /// Returns the mean time of `program` per packet (ns). Fails when the verdict is unexpected.
    fn run(&self, program: BorrowedFd<'_>, packets: u32) -> anyhow::Result<f64> {
        choose(&self.measured, program)?;
        let (time, verdict) = run_feed(self.feed.as_fd(), &self.frame, packets, None)?;
        ensure!(verdict == TC_ACT_UNSPEC, "the last packet's verdict was {verdict}");
        Ok(time)
    }
}

struct Measured {
    case: Case,
    empty: RoundTimes,
    swap: RoundTimes,
    server: RoundTimes,
}

fn measure(case: Case, length: &MeasurementLength) -> anyhow::Result<Measured> {
    let server = Server::new(case)?;
    let runner = Runner::new(case, &server.packets(case)?)?;
    let program = server.programs.program(case.direction);
    let (mut empty, mut swap, mut measured) = (RoundTimes::new(), RoundTimes::new(), RoundTimes::new());
    // The first round warms branch predictors and caches and does not count.
    for round in 0..=length.rounds {
        let floors =
            [&runner.empty, &runner.parse_and_swap_macs].map(|floor| runner.run(floor.as_fd(), length.packets));
        let before = server.counted(case);
        let time = runner.run(program, length.packets)?;
        let counted = server.counted(case) - before;
        let expected = if case.has_service { u64::from(length.packets) } else { 0 };
        ensure!(counted == expected, "{case}: {counted} packets were counted, expected {expected}");
        let [of_empty, of_swap] = floors;
        let (of_empty, of_swap) = (of_empty?, of_swap?);
        if round > 0 {
            empty.push(of_empty);
            swap.push(of_swap);
            measured.push(time);
        }
    }
    Ok(Measured { case, empty, swap, server: measured })
}

/// Measures the server's programs for all kinds of packets. Fails without the capabilities to load BPF programs, or
/// when a program does not do what the case expects.
pub fn run(length: &MeasurementLength) -> anyhow::Result<Report> {
    let mut table = Table::new(&[
        "packet",
        "above empty, ns",
        "quartiles",
        "fastest rounds",
        "multiple of parse + swap",
        "empty, ns",
    ]);
    for case in Case::all() {
        let measured = measure(case, length).with_context(|| case.to_string())?;
        let above_empty = difference(&measured.server, &measured.empty);
        let fastest = fastest_difference(&measured.server, &measured.empty);
        table.add_row([
            measured.case.to_string().into(),
            median_of(&above_empty).into(),
            quartiles(&above_empty).into(),
            fastest.into(),
            (fastest / fastest_difference(&measured.swap, &measured.empty)).into(),
            median_of(&measured.empty).into(),
        ]);
    }
    let about = format!(
        "server.bpf.c at tc on a fresh packet each time, as for the load balancer's program; {} rounds of {} packets \
         per program, in turns. `empty` returns at once; `parse + swap MACs` does that at tc. The packets have no \
         socket, so PAWS clamp and steering are not included.",
        length.rounds, length.packets,
    );
    Ok(Report { name: "server", title: "The server's programs", about, tables: vec![table] })
}

fn now_ms() -> anyhow::Result<u32> {
    Ok(std::time::Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?).as_millis() as u32)
}
