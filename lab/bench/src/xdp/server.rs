//! `coreward-lab bench server`: cost of `server.bpf.c` per packet, above a tc program that does nothing.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, ensure};
use coreward_dataplane::check;
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

use super::Length;
use super::interleaved::{Rounds, above, fastest_above, median_of, quartiles};
use super::runner::{PACKETS, Packet, choose, run_feed};
use super::workload::{VIP, clients, request, response};
use crate::report::{Report, Table};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/fresh_segments.skel.rs"));
}

use skeleton::FreshSegmentsSkelBuilder;

/// linux/pkt_cls.h
const TC_ACT_UNSPEC: i32 = -1;

/// Measured packets.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    direction: Direction,
    connections: usize,
    /// Counts each of the packets; `None`: they are of no service, and nothing counts them.
    counter: Option<intf::server_counter>,
}

const CASES: [Case; 6] = [
    Case {
        name: "received, TSecr restored, 1 connection",
        direction: Direction::Ingress,
        connections: 1,
        counter: Some(intf::SERVER_COUNTER_RESTORED),
    },
    Case {
        name: "received, TSecr restored, 1048576 connections",
        direction: Direction::Ingress,
        connections: PACKETS,
        counter: Some(intf::SERVER_COUNTER_RESTORED),
    },
    Case { name: "received, of no service", direction: Direction::Ingress, connections: PACKETS, counter: None },
    Case {
        name: "sent, TSval stamped, 1 connection",
        direction: Direction::Egress,
        connections: 1,
        counter: Some(intf::SERVER_COUNTER_STAMPED),
    },
    Case {
        name: "sent, TSval stamped, 1048576 connections",
        direction: Direction::Egress,
        connections: PACKETS,
        counter: Some(intf::SERVER_COUNTER_STAMPED),
    },
    Case { name: "sent, of no service", direction: Direction::Egress, connections: PACKETS, counter: None },
];

/// The server's programs, with one service.
struct Server {
    programs: ServerPrograms,
    keys: FleetKeys,
    id: ServerId,
}

impl Server {
    /// `has_service`: whether the packets are of its service.
    fn new(has_service: bool) -> anyhow::Result<Self> {
        let mut rng = seeded_rng(1, 0);
        let mut key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let keys = FleetKeys { keys: [key(), key()], current: KeyIndex::First };
        let mut programs = ServerPrograms::load_only(false)?;
        // The first key stamps since before the first packet.
        programs.set_keys(&keys, now_ms()? - 1000);
        let id = ServerId::try_from(4711)?;
        let port = if has_service { VIP.1 } else { VIP.1 + 1 };
        let address = ServiceAddress { socket: (VIP.0, port).into(), protocol: Protocol::Tcp };
        programs.set_services(&[(address, id, ServiceMode::default())])?;
        Ok(Self { programs, keys, id })
    }

    fn packets(&self, case: &Case) -> anyhow::Result<Vec<Packet>> {
        let milliseconds = now_ms()?;
        let packet = |client: &std::net::SocketAddrV4| {
            let tuple = FourTuple::ipv4((*client.ip(), client.port()), VIP);
            let cookie = Cookie::Server(self.id);
            let echo = cookie::stamp(&self.keys, &self.programs.time_key(), &tuple, cookie, milliseconds);
            let mut ports = [client.port().to_be_bytes(), VIP.1.to_be_bytes()];
            if matches!(case.direction, Direction::Egress) {
                ports.reverse();
            }
            Packet {
                client_address: u32::from_ne_bytes(client.ip().octets()),
                ports: u32::from_ne_bytes(ports.concat().try_into().expect("four bytes")),
                echo: echo.to_be(),
                line: 0,
            }
        };
        Ok(clients(case.connections).iter().map(packet).collect())
    }

    fn counted(&self, case: &Case) -> u64 {
        case.counter.map_or(0, |counter| self.programs.counter(counter))
    }
}

/// The programs of fresh_segments.bpf.c, for one frame and its variations.
struct Runner {
    frame: Vec<u8>,
    feed: OwnedFd,
    empty: OwnedFd,
    measured: MapHandle,
}

impl Runner {
    fn new(case: &Case, packets: &[Packet]) -> anyhow::Result<Self> {
        ensure!(packets.len().is_power_of_two() && packets.len() <= PACKETS, "{} packets", packets.len());
        let frame = match case.direction {
            Direction::Ingress => request(),
            Direction::Egress => response(),
        };
        let mut bytes = frame.bytes;
        // The loopback device's address: the test run takes the packet as one for this host.
        bytes[..6].fill(0);
        let mut storage = MaybeUninit::uninit();
        let mut open =
            FreshSegmentsSkelBuilder::default().open(&mut storage).context("opening fresh_segments.bpf.o")?;
        let constants = open.maps.rodata_data.as_deref_mut().context("fresh_segments.bpf.o has no constants")?;
        constants.mask = packets.len() as u32 - 1;
        constants.client_at = frame.client_at;
        constants.ports_at = PORTS_AT;
        constants.timestamp_at = frame.echo_at;
        let loaded = open.load().context("loading fresh_segments.bpf.c")?;
        let memory: MmapArray<[Packet; PACKETS]> = MmapArray::new(loaded.maps.bss_packets.as_fd())?;
        memory.write(0, packets);
        let feed = match case.direction {
            Direction::Ingress => loaded.progs.fresh_request.as_fd().try_clone_to_owned()?,
            Direction::Egress => loaded.progs.fresh_answer.as_fd().try_clone_to_owned()?,
        };
        Ok(Self {
            frame: bytes,
            feed,
            empty: loaded.progs.empty.as_fd().try_clone_to_owned()?,
            measured: MapHandle::try_from(&loaded.maps.measured)?,
        })
    }

    /// Mean time of one run of `program` (ns).
    fn run(&self, program: BorrowedFd<'_>, packets: u32) -> anyhow::Result<f64> {
        choose(&self.measured, program)?;
        let (time, verdict) = run_feed(self.feed.as_fd(), &self.frame, packets, None)?;
        ensure!(verdict == TC_ACT_UNSPEC, "the last packet's verdict was {verdict}");
        Ok(time)
    }
}

/// Offset of the ports behind Ethernet and IPv4 without options.
const PORTS_AT: u32 = 14 + 20;

struct Measured {
    case: Case,
    empty: Rounds,
    server: Rounds,
    verifier_instructions: u32,
}

fn measure(case: Case, length: &Length) -> anyhow::Result<Measured> {
    let server = Server::new(case.counter.is_some())?;
    let runner = Runner::new(&case, &server.packets(&case)?)?;
    let program = server.programs.program(case.direction);
    let (mut empty, mut measured) = (Rounds::new(), Rounds::new());
    // The first round warms branch predictors and caches and does not count.
    for round in 0..=length.rounds {
        let floor = runner.run(runner.empty.as_fd(), length.packets)?;
        let before = server.counted(&case);
        let time = runner.run(program, length.packets)?;
        let counted = server.counted(&case) - before;
        let expected = if case.counter.is_some() { u64::from(length.packets) } else { 0 };
        ensure!(counted == expected, "{}: {counted} packets were counted, expected {expected}", case.name);
        if round > 0 {
            empty.push(floor);
            measured.push(time);
        }
    }
    Ok(Measured { case, empty, server: measured, verifier_instructions: check::verified_instructions(program)? })
}

/// Measures every case. Fails without the right to load BPF programs, or when a program does not do what the case
/// expects.
pub fn run(length: &Length) -> anyhow::Result<Report> {
    let mut table = Table::new(&[
        "packet",
        "above empty, ns",
        "quartiles",
        "fastest rounds",
        "server, ns",
        "empty, ns",
        "verifier instructions",
    ]);
    for case in CASES {
        let measured = measure(case, length).with_context(|| case.name)?;
        let above_empty = above(&measured.server, &measured.empty);
        table.row([
            measured.case.name.into(),
            median_of(&above_empty).into(),
            quartiles(&above_empty).into(),
            fastest_above(&measured.server, &measured.empty).into(),
            median_of(&measured.server).into(),
            median_of(&measured.empty).into(),
            measured.verifier_instructions.into(),
        ]);
    }
    let about = format!(
        "server.bpf.c at tc on a fresh packet each time, as for the load balancer's program; {} rounds of {} packets \
         per program, in turns. `empty` returns at once. The packets have no socket: what the PAWS clamp and steering \
         need of one is not in the figures. Checksums are updated by the kernel's helper.",
        length.rounds, length.packets,
    );
    Ok(Report { name: "server", title: "The server's programs", about, tables: vec![table] })
}

fn now_ms() -> anyhow::Result<u32> {
    Ok(std::time::Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?).as_millis() as u32)
}
