//! A server whose cores also forward packets: `crossrss` must move new connections away from the loaded core.
//!
//! The guest runs server `s1`, whose agent at `eth0` measures CPU load, and the load balancer in front of it. `s2` is a
//! second agent at `eth1`, with a constant published load. New connections are SYNs from the tap; the destination MAC
//! address with which each leaves the guest identifies its server.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use coreward_model::FourTuple;
use serde_json::Value;

use crate::agent::{self, START_TIMEOUT, poll};
use crate::guest::{Guest, Monitor, QUEUE_COUNT};
use crate::rss;
use crate::segment::{HostEmulator, mac_of};
use crate::tally::Tally;
use crate::wire::{FORWARDED_DESTINATION, GuestLink, VIP, flows_of_round};

/// Last bytes of the IPv4 addresses of the servers `s1` and `s2`.
const HOSTS: [u8; 2] = [11, 12];
/// Published load of each core of `s2` (%), which is between that of the idle guest and that of a core that forwards.
const OTHER_SERVER_LOAD_PCT: u32 = 50;
/// Minimum reported load of the forwarding core while SYNs are counted.
const FORWARDING_LOAD: f64 = 0.65;
/// Initial and maximum rate of forwarded packets (per second). The rate that loads a core depends on QEMU's emulation.
const PACKETS_PER_SECOND: std::ops::RangeInclusive<u32> = 1_000..=64_000;
/// Time after which loads and tables have followed a new rate.
const SETTLE_TIME: Duration = Duration::from_secs(3);
/// Interval between flushes of the receive queues, which QEMU may leave full ([`Monitor::flush_receive_queues`]).
const FLUSH_INTERVAL: Duration = Duration::from_millis(100);
/// Number of rounds of SYNs in each measurement.
const ROUND_COUNT: u8 = 4;
/// Maximum number of transmissions of a SYN, because the loaded core drops some.
const MAX_TRANSMISSIONS: usize = 10;
/// Maximum number of measurements, of which one must have the expected result.
const MEASUREMENT_COUNT: u8 = 5;

/// Returns the configuration files of the guest, as name (without leading slash) and content.
pub fn files() -> Vec<(&'static str, String)> {
    let controller = "listen = \"127.0.0.1:7400\"\nstore = \"/run/forwarding.redb\"\n\
                      fleet = \"forwarding-fleet.toml\"\n";
    let [s1, s2] = HOSTS;
    let fleet = format!(
        "report_interval = \"500ms\"\n[[server]]\nname = \"s1\"\naddress = \"10.2.0.{s1}\"\n\
         [[server]]\nname = \"s2\"\naddress = \"10.2.0.{s2}\"\n\
         [[service]]\nname = \"web\"\nvip = \"{VIP}\"\npolicy = \"crossrss\"\n"
    );
    let agent = |index: usize, load: &str| {
        format!(
            "server = \"s{}\"\ncontroller = \"127.0.0.1:7400\"\ninterface = \"eth{index}\"\nmanage_rss = true\n\
             pin_directory = \"/sys/fs/bpf/agent{index}\"\nsteer = \"off\"\nload = {load}\n",
            index + 1
        )
    };
    vec![
        ("etc/forwarding.toml", controller.to_owned()),
        ("etc/forwarding-fleet.toml", fleet),
        ("etc/agent0.toml", agent(0, "{ source = \"cpu\" }")),
        ("etc/agent1.toml", agent(1, "{ source = \"published\", path = \"/run/busy\" }")),
        ("etc/publish", include_str!("../guest/publish").to_owned()),
    ]
}

/// Starts the daemons, and checks which servers get new connections before and while one core is loaded by forwarding.
/// Fails when the daemons do not start.
pub fn check(guest: &mut Guest, wire: &GuestLink, name: &str, tally: &mut Tally) -> Result<()> {
    let segment = HostEmulator::new(&HOSTS)?;
    start(guest)?;
    let shown = rss::read_rss(guest)?;
    let idle = measure_until(wire, &segment, 0, |placed| {
        let [idle, all] = count_placed(placed, |_| true);
        idle * 10 >= all * 9
    })?;
    let [to_idle, all] = count_placed(&idle.placed, |_| true);
    let found = format!("{to_idle} of {all} SYNs to the server with idle cores; {}", format_loads(guest)?);
    tally.check(&format!("{name}: idle cores get the connections"), idle.verdict(found));

    let flow =
        FourTuple::ipv4(("10.1.251.1".parse()?, 4711), (*FORWARDED_DESTINATION.ip(), FORWARDED_DESTINATION.port()));
    let queue = rss::predicted_queue(&shown, &flow);
    let on_queue = |flow: &FourTuple| rss::predicted_queue(&shown, flow) == queue;
    let follows = |placed: &PlacedFlows| {
        let [on_core, on_core_all] = count_placed(placed, on_queue);
        let [others, others_all] = count_placed(placed, |flow| !on_queue(flow));
        on_core * 10 <= on_core_all && others * 10 >= others_all * 9
    };
    let (loaded, rate) =
        measure_under_load(guest, wire, &flow, queue, || measure_until(wire, &segment, idle.next_round, follows))?;
    let loaded = loaded.with_context(|| format!("while core {queue} forwards {rate} packets/s"))?;
    let [on_core, on_core_all] = count_placed(&loaded.placed, on_queue);
    let [others, others_all] = count_placed(&loaded.placed, |flow| !on_queue(flow));
    let found = format!(
        "of core {queue}, with {rate} forwarded packets/s, {on_core} of {on_core_all} SYNs, of the others {others} of \
         {others_all}; {}",
        format_loads(guest)?
    );
    tally.check(&format!("{name}: crossrss moves connections away from the core that forwards"), loaded.verdict(found));
    Ok(())
}

/// Starts a controller, both agents and the load balancer, and adds the route of the packets to forward.
fn start(guest: &mut Guest) -> Result<()> {
    guest.run("ip link set eth1 up && ip addr add 10.2.0.1/24 dev eth0 && echo 1 > /proc/sys/net/ipv4/ip_forward")?;
    // The next hop is a device of the guest, because otherwise QEMU's network thread would be busy before a core is.
    // The peer of a veth is `veth0`.
    let next_hop = mac_of(254).map(|byte| format!("{byte:02x}")).join(":");
    let forwarded = FORWARDED_DESTINATION.ip();
    guest.run(&format!(
        "ip link add out type veth && ip link set veth0 up && ip link set out up && \
         ip route add {forwarded}/32 dev out && arp -i out -s {forwarded} {next_hop}"
    ))?;
    guest.run(&format!("start publish sh /etc/publish /run/busy {OTHER_SERVER_LOAD_PCT} {QUEUE_COUNT}"))?;
    guest.run("start controller coreward controller --config /etc/forwarding.toml")?;
    for agent in ["agent0", "agent1"] {
        guest.run(&format!("start {agent} coreward agent --config /etc/{agent}.toml"))?;
    }
    guest.run("start lb coreward lb --config /etc/lb.toml")?;
    let ready = poll(guest, START_TIMEOUT, |guest| {
        let Some(status) = agent::status(guest)? else { return Ok(None) };
        let generation = status["load_balancers"][0]["state"]["table_generations"]["web"].as_u64();
        let reports = core_loads(&status).is_some_and(|servers| servers.iter().all(|cores| !cores.is_empty()));
        Ok((generation.is_some_and(|generation| generation > 1) && reports).then_some(()))
    });
    ready.with_context(|| ["controller", "agent0", "agent1", "lb"].map(|name| agent::log(guest, name)).join("\n"))?;
    std::thread::sleep(SETTLE_TIME);
    Ok(())
}

/// Returns the loads of all cores of `s1` and `s2` that a status contains.
fn core_loads(status: &Value) -> Option<[Vec<f64>; 2]> {
    let of = |name: &str| {
        let server = status["servers"].as_array()?.iter().find(|server| server["name"] == name)?;
        server["core_load"].as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>()
    };
    Some([of("s1")?, of("s2")?])
}

fn reported_core_loads(guest: &mut Guest) -> Result<[Vec<f64>; 2]> {
    let status = agent::status(guest)?.context("the controller does not answer")?;
    core_loads(&status).with_context(|| format!("no loads in {status}"))
}

fn format_loads(guest: &mut Guest) -> Result<String> {
    let [s1, s2] = reported_core_loads(guest)?
        .map(|cores| cores.iter().map(|load| format!("{:.0}", load * 100.0)).collect::<Vec<_>>().join(", "));
    Ok(format!("loads {s1} % against {s2} %"))
}

/// Forwards packets of `flow`, which arrive at `queue`, at a growing rate until the queue's core is loaded. Then runs
/// `measured`, and returns its result and the rate (packets per second).
fn measure_under_load<T>(
    guest: &mut Guest,
    wire: &GuestLink,
    flow: &FourTuple,
    queue: u16,
    measured: impl FnOnce() -> T,
) -> Result<(T, u32)> {
    let (rate, ended) = (AtomicU32::new(*PACKETS_PER_SECOND.start()), AtomicBool::new(false));
    let monitor = guest.monitor()?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send_paced(wire, monitor, flow, &rate, &ended));
        let result = load_core(guest, queue, &rate).map(|()| measured());
        ended.store(true, Ordering::Relaxed);
        // An error of the sender explains one of the measurement.
        sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
        Ok((result?, rate.load(Ordering::Relaxed)))
    })
}

/// Raises the rate until two readings show a loaded core for `queue`: a single one may be a burst of a daemon.
fn load_core(guest: &mut Guest, queue: u16, rate: &AtomicU32) -> Result<()> {
    let mut loaded = 0;
    loop {
        std::thread::sleep(SETTLE_TIME);
        let [cores, _] = reported_core_loads(guest)?;
        let load = *cores.get(usize::from(queue)).with_context(|| format!("no load of queue {queue}: {cores:?}"))?;
        if load >= FORWARDING_LOAD {
            loaded += 1;
            if loaded == 2 {
                return Ok(());
            }
            continue;
        }
        loaded = 0;
        let now = rate.load(Ordering::Relaxed);
        ensure!(now < *PACKETS_PER_SECOND.end(), "{now} packets/s load no core: {cores:?}");
        rate.store(now + now / 4, Ordering::Relaxed);
    }
}

/// Sends `rate` packets per second in batches of one millisecond, until `ended` is set.
fn send_paced(
    wire: &GuestLink,
    mut monitor: Monitor,
    flow: &FourTuple,
    rate: &AtomicU32,
    ended: &AtomicBool,
) -> Result<()> {
    let (mut due, mut flush) = (Instant::now(), Instant::now());
    while !ended.load(Ordering::Relaxed) {
        wire.send_acks(flow, rate.load(Ordering::Relaxed).div_ceil(1_000))?;
        if flush.elapsed() >= FLUSH_INTERVAL {
            flush = Instant::now();
            monitor.flush_receive_queues()?;
        }
        // A late sender skips packets, which would otherwise be a burst.
        due = (due + Duration::from_millis(1)).max(Instant::now());
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// Flow of each received SYN, and the last address byte of the server that received it.
type PlacedFlows = Vec<(FourTuple, u8)>;

struct MeasuredPlacement {
    placed: PlacedFlows,
    /// Whether the placement is as expected.
    is_expected: bool,
    next_round: u8,
}

impl MeasuredPlacement {
    fn verdict(&self, found: String) -> Result<String> {
        ensure!(self.is_expected, found);
        Ok(found)
    }
}

/// Measures until the placement is `good`, at most [`MEASUREMENT_COUNT`] times, because the daemons' own load varies.
fn measure_until(
    wire: &GuestLink,
    segment: &HostEmulator,
    first: u8,
    good: impl Fn(&PlacedFlows) -> bool,
) -> Result<MeasuredPlacement> {
    let mut measured = MeasuredPlacement { placed: PlacedFlows::new(), is_expected: false, next_round: first };
    for _ in 0..MEASUREMENT_COUNT {
        measured.placed = measure(wire, segment, measured.next_round)?;
        measured.next_round += ROUND_COUNT;
        measured.is_expected = good(&measured.placed);
        if measured.is_expected {
            break;
        }
    }
    Ok(measured)
}

/// Sends the SYNs of [`ROUND_COUNT`] rounds, beginning with round `first`, and retransmits lost ones. Returns the
/// servers that received them. Fails when a SYN is still lost.
fn measure(wire: &GuestLink, segment: &HostEmulator, first: u8) -> Result<PlacedFlows> {
    segment.take_syns();
    let mut missing: Vec<FourTuple> = (first..first + ROUND_COUNT).flat_map(flows_of_round).collect();
    let sent = missing.len();
    let mut placed = PlacedFlows::new();
    for _ in 0..MAX_TRANSMISSIONS {
        for flow in &missing {
            wire.send_syn(flow)?;
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(500));
        let syns = segment.take_syns();
        missing.retain(|flow| {
            let host = match flow.client() {
                SocketAddr::V4(client) => syns.get(&client),
                SocketAddr::V6(_) => None,
            };
            placed.extend(host.map(|host| (*flow, *host)));
            host.is_none()
        });
        if missing.is_empty() {
            return Ok(placed);
        }
    }
    bail!("{} of {sent} SYNs are lost after {MAX_TRANSMISSIONS} transmissions", missing.len())
}

/// Returns how many of the SYNs selected by `chosen` reached `s1`, and the number of all selected SYNs.
fn count_placed(placed: &PlacedFlows, chosen: impl Fn(&FourTuple) -> bool) -> [usize; 2] {
    let of = placed.iter().filter(|(flow, _)| chosen(flow));
    [of.clone().filter(|(_, host)| *host == HOSTS[0]).count(), of.count()]
}
