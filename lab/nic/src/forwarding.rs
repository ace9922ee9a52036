//! Checks that `crossrss` moves new connections away from a server's core that also forwards packets.
//!
//! The guest runs the load balancer and server `s1`, whose agent measures the CPU load at `eth0`. Server `s2` is a
//! second agent at `eth1`, which publishes a constant load. New connections are SYNs from the tap. The destination MAC
//! address with which a SYN leaves the guest identifies its server.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use coreward_model::FourTuple;
use serde_json::Value;

use crate::agent::{self, DAEMON_START_TIMEOUT, poll_guest_until_some};
use crate::check_tally::CheckTally;
use crate::emulated_hosts::{HostEmulator, host_mac};
use crate::guest::{NIC_QUEUE_COUNT, QemuGuest, QemuMonitor};
use crate::guest_tap::{FORWARDED_PACKET_DESTINATION, GuestTap, IPV4_SYN_DESTINATION, flows_of_round};
use crate::rss;

/// Last byte of the IPv4 address of each server, `s1` and `s2`.
const SERVER_ADDRESS_LAST_BYTES: [u8; 2] = [11, 12];
/// Load that `s2` publishes for each core (%). It is between the load of the idle guest and that of a forwarding core.
const PUBLISHED_LOAD_PCT: u32 = 50;
/// Minimum load (0 to 1) that must be reported for the forwarding core while SYNs are counted.
const MIN_FORWARDING_LOAD: f64 = 0.65;
/// Initial and maximum rate of forwarded packets (per second). QEMU's emulation decides which rate loads a core.
const PACKET_RATE_RANGE: std::ops::RangeInclusive<u32> = 1_000..=64_000;
/// Time after which reported loads and placement tables reflect a new packet rate.
const LOAD_SETTLE_TIME: Duration = Duration::from_secs(3);
/// Interval between two flushes of QEMU's receive queues, which may otherwise stay full
/// ([`QemuMonitor::flush_receive_queues`]). With a longer interval, a higher rate can load the core less.
const QUEUE_FLUSH_INTERVAL: Duration = Duration::from_millis(25);
const SYN_ROUNDS_PER_MEASUREMENT: u8 = 4;
/// Maximum number of transmissions of each SYN. The loaded core drops some.
const MAX_SYN_TRANSMISSIONS: usize = 10;
/// Maximum number of measurements, of which one must have the expected result.
const MAX_PLACEMENT_MEASUREMENTS: u8 = 5;

/// Returns the guest's configuration files, as pairs of name (without leading slash) and content.
pub fn forwarding_guest_config_files() -> Vec<(&'static str, String)> {
    let controller_config = "listen = \"127.0.0.1:7400\"\nstore = \"/run/forwarding.redb\"\n\
                      fleet = \"forwarding-fleet.toml\"\n";
    let [s1, s2] = SERVER_ADDRESS_LAST_BYTES;
    let fleet_document = format!(
        "report_interval = \"500ms\"\n[[server]]\nname = \"s1\"\naddress = \"10.2.0.{s1}\"\n\
         [[server]]\nname = \"s2\"\naddress = \"10.2.0.{s2}\"\n\
         [[service]]\nname = \"web\"\nvip = \"{IPV4_SYN_DESTINATION}\"\npolicy = \"crossrss\"\n"
    );
    let format_agent_config = |index: usize, load: &str| {
        format!(
            "server = \"s{}\"\ncontroller = \"127.0.0.1:7400\"\ninterface = \"eth{index}\"\nmanage_rss = true\n\
             pin_directory = \"/sys/fs/bpf/agent{index}\"\nsteer = \"off\"\nload = {load}\n",
            index + 1
        )
    };
    vec![
        ("etc/forwarding.toml", controller_config.to_owned()),
        ("etc/forwarding-fleet.toml", fleet_document),
        ("etc/agent0.toml", format_agent_config(0, "{ source = \"cpu\" }")),
        ("etc/agent1.toml", format_agent_config(1, "{ source = \"published\", path = \"/run/busy\" }")),
        ("etc/publish", include_str!("../guest/publish").to_owned()),
    ]
}

/// Starts the daemons, and checks which servers get new connections before and while forwarding loads one core. Fails
/// when the daemons do not start.
pub fn check_connection_placement(
    guest: &mut QemuGuest,
    guest_tap: &GuestTap,
    name: &str,
    tally: &mut CheckTally,
) -> Result<()> {
    let host_emulator = HostEmulator::new(&SERVER_ADDRESS_LAST_BYTES)?;
    start_daemons(guest)?;
    let shown_rss = rss::read_rss(guest)?;
    let next_flow_round = check_idle_placement(guest, guest_tap, &host_emulator, name, tally)?;

    let forwarded_flow = FourTuple::ipv4(
        ("10.1.251.1".parse()?, 4711),
        (*FORWARDED_PACKET_DESTINATION.ip(), FORWARDED_PACKET_DESTINATION.port()),
    );
    let loaded_queue = rss::predicted_queue(&shown_rss, &forwarded_flow);
    let is_on_loaded_queue = |flow: &FourTuple| rss::predicted_queue(&shown_rss, flow) == loaded_queue;
    let avoids_loaded_core = |placements: &FlowPlacements| {
        let [on_core_count, on_core_total] = count_first_server_syns(placements, is_on_loaded_queue);
        let [other_count, other_total] = count_first_server_syns(placements, |flow| !is_on_loaded_queue(flow));
        on_core_count * 10 <= on_core_total && other_count * 10 >= other_total * 9
    };
    let (measurement_result, packet_rate) =
        measure_placement_under_load(guest, guest_tap, &forwarded_flow, loaded_queue, || {
            measure_until_expected_placement(guest_tap, &host_emulator, next_flow_round, avoids_loaded_core)
        })?;
    let placement_under_load =
        measurement_result.with_context(|| format!("while core {loaded_queue} forwards {packet_rate} packets/s"))?;
    let [on_core_count, on_core_total] = count_first_server_syns(&placement_under_load.placements, is_on_loaded_queue);
    let [other_count, other_total] =
        count_first_server_syns(&placement_under_load.placements, |flow| !is_on_loaded_queue(flow));
    let placement_text = format!(
        "of core {loaded_queue}, with {packet_rate} forwarded packets/s, {on_core_count} of {on_core_total} SYNs, of \
         the others {other_count} of {other_total}; {}",
        fetch_core_loads_text(guest)?
    );
    tally.record_result(
        &format!("{name}: crossrss moves connections away from the core that forwards"),
        placement_under_load.require_expected_placement(placement_text),
    );
    Ok(())
}

/// Checks that server `s1` gets the connections while its cores are idle. Returns the first round whose flows were not
/// used.
fn check_idle_placement(
    guest: &mut QemuGuest,
    guest_tap: &GuestTap,
    host_emulator: &HostEmulator,
    name: &str,
    tally: &mut CheckTally,
) -> Result<u8> {
    let idle_placement = measure_until_expected_placement(guest_tap, host_emulator, 0, |placements| {
        let [idle_count, syn_count] = count_first_server_syns(placements, |_| true);
        idle_count * 10 >= syn_count * 9
    })?;
    let [idle_count, syn_count] = count_first_server_syns(&idle_placement.placements, |_| true);
    let placement_text =
        format!("{idle_count} of {syn_count} SYNs to the server with idle cores; {}", fetch_core_loads_text(guest)?);
    tally.record_result(
        &format!("{name}: idle cores get the connections"),
        idle_placement.require_expected_placement(placement_text),
    );
    Ok(idle_placement.next_flow_round)
}

/// Starts a controller, both agents and the load balancer, and adds a route for the packets to forward.
fn start_daemons(guest: &mut QemuGuest) -> Result<()> {
    guest.run_successfully(
        "ip link set eth1 up && ip addr add 10.2.0.1/24 dev eth0 && echo 1 > /proc/sys/net/ipv4/ip_forward",
    )?;
    // The next hop is a device of the guest, because otherwise QEMU's network thread would be busy before a core is.
    // The kernel names the other end of the veth pair `veth0`.
    let next_hop_mac = host_mac(254).map(|byte| format!("{byte:02x}")).join(":");
    let forwarded_address = FORWARDED_PACKET_DESTINATION.ip();
    guest.run_successfully(&format!(
        "ip link add out type veth && ip link set veth0 up && ip link set out up && ip route add \
         {forwarded_address}/32 dev out && arp -i out -s {forwarded_address} {next_hop_mac}"
    ))?;
    guest
        .run_successfully(&format!("start publish sh /etc/publish /run/busy {PUBLISHED_LOAD_PCT} {NIC_QUEUE_COUNT}"))?;
    guest.run_successfully("start controller coreward controller --config /etc/forwarding.toml")?;
    for agent in ["agent0", "agent1"] {
        guest.run_successfully(&format!("start {agent} coreward agent --config /etc/{agent}.toml"))?;
    }
    guest.run_successfully("start lb coreward lb --config /etc/lb.toml")?;
    let wait_result = poll_guest_until_some(guest, DAEMON_START_TIMEOUT, |guest| {
        let Some(status) = agent::fetch_fleet_status(guest)? else { return Ok(None) };
        let table_generation = status["load_balancers"][0]["state"]["table_generations"]["web"].as_u64();
        let has_reports =
            core_loads_in_status(&status).is_some_and(|servers| servers.iter().all(|cores| !cores.is_empty()));
        Ok((table_generation.is_some_and(|generation| generation > 1) && has_reports).then_some(()))
    });
    wait_result.with_context(|| {
        ["controller", "agent0", "agent1", "lb"].map(|name| agent::read_log_tail(guest, name)).join("\n")
    })?;
    std::thread::sleep(LOAD_SETTLE_TIME);
    Ok(())
}

/// Returns the load of each core of server `s1`, and of server `s2`, if the status contains all of them.
fn core_loads_in_status(status: &Value) -> Option<[Vec<f64>; 2]> {
    let loads_of_server = |name: &str| {
        let server = status["servers"].as_array()?.iter().find(|server| server["name"] == name)?;
        server["core_loads"].as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>()
    };
    Some([loads_of_server("s1")?, loads_of_server("s2")?])
}

fn fetch_reported_core_loads(guest: &mut QemuGuest) -> Result<[Vec<f64>; 2]> {
    let status = agent::fetch_fleet_status(guest)?.context("the controller does not answer")?;
    core_loads_in_status(&status).with_context(|| format!("no loads in {status}"))
}

fn fetch_core_loads_text(guest: &mut QemuGuest) -> Result<String> {
    let [s1, s2] = fetch_reported_core_loads(guest)?
        .map(|cores| cores.iter().map(|load| format!("{:.0}", load * 100.0)).collect::<Vec<_>>().join(", "));
    Ok(format!("loads {s1} % against {s2} %"))
}

/// Forwards packets of `flow`, which arrive at `queue`, at a growing rate until the queue's core is loaded. Then calls
/// `measure_placement`, and returns its result and the rate (packets per second).
fn measure_placement_under_load<T>(
    guest: &mut QemuGuest,
    guest_tap: &GuestTap,
    flow: &FourTuple,
    queue: u16,
    measure_placement: impl FnOnce() -> T,
) -> Result<(T, u32)> {
    let (packets_per_second, should_stop) = (AtomicU32::new(*PACKET_RATE_RANGE.start()), AtomicBool::new(false));
    let monitor = guest.connect_monitor()?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send_packets_at_rate(guest_tap, monitor, flow, &packets_per_second, &should_stop));
        let measurement_result =
            raise_rate_until_core_loaded(guest, queue, &packets_per_second).map(|()| measure_placement());
        should_stop.store(true, Ordering::Relaxed);
        // The sender's error is returned first, because it explains an error of the measurement.
        sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
        Ok((measurement_result?, packets_per_second.load(Ordering::Relaxed)))
    })
}

/// Raises the packet rate until two readings of the load show that the core of `queue` is loaded. A single high reading
/// may be a daemon's burst of work.
fn raise_rate_until_core_loaded(guest: &mut QemuGuest, queue: u16, packets_per_second: &AtomicU32) -> Result<()> {
    let mut loaded_reading_count = 0;
    loop {
        std::thread::sleep(LOAD_SETTLE_TIME);
        let [core_loads, _] = fetch_reported_core_loads(guest)?;
        let core_load =
            *core_loads.get(usize::from(queue)).with_context(|| format!("no load of queue {queue}: {core_loads:?}"))?;
        if core_load >= MIN_FORWARDING_LOAD {
            loaded_reading_count += 1;
            if loaded_reading_count == 2 {
                return Ok(());
            }
            continue;
        }
        loaded_reading_count = 0;
        let current_rate = packets_per_second.load(Ordering::Relaxed);
        ensure!(current_rate < *PACKET_RATE_RANGE.end(), "{current_rate} packets/s load no core: {core_loads:?}");
        packets_per_second.store(current_rate + current_rate / 4, Ordering::Relaxed);
    }
}

/// Sends `packets_per_second` packets per second, in one batch per millisecond, until `should_stop` is set.
fn send_packets_at_rate(
    guest_tap: &GuestTap,
    mut monitor: QemuMonitor,
    flow: &FourTuple,
    packets_per_second: &AtomicU32,
    should_stop: &AtomicBool,
) -> Result<()> {
    let (mut next_batch, mut last_flush) = (Instant::now(), Instant::now());
    while !should_stop.load(Ordering::Relaxed) {
        guest_tap.send_acks(flow, packets_per_second.load(Ordering::Relaxed).div_ceil(1_000))?;
        if last_flush.elapsed() >= QUEUE_FLUSH_INTERVAL {
            last_flush = Instant::now();
            monitor.flush_receive_queues()?;
        }
        // A late sender skips packets, which would otherwise form a burst.
        next_batch = (next_batch + Duration::from_millis(1)).max(Instant::now());
        std::thread::sleep(next_batch.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// Flow of each received SYN, with the last address byte of the server that received it.
type FlowPlacements = Vec<(FourTuple, u8)>;

struct ConnectionPlacementMeasurement {
    placements: FlowPlacements,
    is_placement_expected: bool,
    next_flow_round: u8,
}

impl ConnectionPlacementMeasurement {
    fn require_expected_placement(&self, placement_text: String) -> Result<String> {
        ensure!(self.is_placement_expected, placement_text);
        Ok(placement_text)
    }
}

/// Repeats the measurement until `is_expected` returns true for the placements, at most [`MAX_PLACEMENT_MEASUREMENTS`]
/// times. The daemons' own load can disturb a measurement.
fn measure_until_expected_placement(
    guest_tap: &GuestTap,
    host_emulator: &HostEmulator,
    first_round: u8,
    is_expected: impl Fn(&FlowPlacements) -> bool,
) -> Result<ConnectionPlacementMeasurement> {
    let mut measurement = ConnectionPlacementMeasurement {
        placements: FlowPlacements::new(),
        is_placement_expected: false,
        next_flow_round: first_round,
    };
    for _ in 0..MAX_PLACEMENT_MEASUREMENTS {
        measurement.placements = measure_placements(guest_tap, host_emulator, measurement.next_flow_round)?;
        measurement.next_flow_round += SYN_ROUNDS_PER_MEASUREMENT;
        measurement.is_placement_expected = is_expected(&measurement.placements);
        if measurement.is_placement_expected {
            break;
        }
    }
    Ok(measurement)
}

/// Sends a SYN for each flow of [`SYN_ROUNDS_PER_MEASUREMENT`] rounds from `first_round` on, and retransmits lost ones.
/// Returns the server that received each SYN. Fails when a SYN is still lost.
fn measure_placements(guest_tap: &GuestTap, host_emulator: &HostEmulator, first_round: u8) -> Result<FlowPlacements> {
    host_emulator.take_received_syns();
    let mut missing_flows: Vec<FourTuple> =
        (first_round..first_round + SYN_ROUNDS_PER_MEASUREMENT).flat_map(flows_of_round).collect();
    let sent_syn_count = missing_flows.len();
    let mut placements = FlowPlacements::new();
    for _ in 0..MAX_SYN_TRANSMISSIONS {
        for flow in &missing_flows {
            guest_tap.send_syn(flow)?;
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(500));
        let received_syns = host_emulator.take_received_syns();
        missing_flows.retain(|flow| {
            let receiving_host = match flow.client() {
                SocketAddr::V4(client) => received_syns.get(&client),
                SocketAddr::V6(_) => None,
            };
            placements.extend(receiving_host.map(|host| (*flow, *host)));
            receiving_host.is_none()
        });
        if missing_flows.is_empty() {
            return Ok(placements);
        }
    }
    bail!("{} of {sent_syn_count} SYNs are lost after {MAX_SYN_TRANSMISSIONS} transmissions", missing_flows.len())
}

/// Counts the SYNs that `is_selected` selects. Returns how many of them reached server `s1`, and their total number.
fn count_first_server_syns(placements: &FlowPlacements, is_selected: impl Fn(&FourTuple) -> bool) -> [usize; 2] {
    let selected_placements = placements.iter().filter(|(flow, _)| is_selected(flow));
    [
        selected_placements.clone().filter(|(_, host)| *host == SERVER_ADDRESS_LAST_BYTES[0]).count(),
        selected_placements.count(),
    ]
}
