//! `coreward-lab bench throughput`: live frames through the load balancer's native XDP hook, compared with a program
//! that only swaps MAC addresses.

mod generator;
pub mod wire;

use std::collections::HashSet;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use coreward_dataplane::lb::Counters;
use coreward_intf as intf;
use coreward_model::connection_table::{ConnectionIndex, TableSize};
use coreward_model::consistency::Consistency;
use coreward_model::placement::PlacementRule;

use super::balancer::{Balancer, BalancerSetup, CONNECTION_TABLE_ENTRIES};
use super::flood::two_cpus;
use super::interleaved::{RoundTimes, interleave, median_of, quartiles_with};
use super::workload::{Case, syn};
use crate::cpus::{self, THIS_THREAD};
use crate::namespace;
use crate::report::{Cell, Goal, Report, Table, goal_cells};
use generator::{Floor, Generator, LIVE_PACKET_COUNT, Traffic};
use wire::{NapiThread, NapiUsage, VethPair, raise_priority};

/// Number of rounds and frames of the measurement.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Number of rounds; in each, all kinds of traffic and the floor are measured one after the other
    #[arg(long, default_value_t = Self::default().rounds, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of frames per kind of traffic and round
    #[arg(long, default_value_t = Self::default().frames, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    frames: u32,
}

impl Default for Args {
    fn default() -> Self {
        Self { rounds: 15, frames: 1 << 20 }
    }
}

/// Kind of traffic that is measured, with the mode of its service.
#[derive(Debug, Clone, Copy)]
struct ServiceTraffic {
    name: &'static str,
    consistency: Consistency,
    rule: PlacementRule,
    /// Number of SYNs of new clients among 16 packets; the other packets belong to open connections.
    syns_per_16: usize,
    /// Goal for the CPU time of the first baseline divided by that of this traffic.
    goal: Option<Goal>,
    /// Baseline program that is measured instead of a load balancer.
    floor: Option<Floor>,
}

impl ServiceTraffic {
    const FLOOR: ServiceTraffic = ServiceTraffic {
        name: "swap MACs",
        consistency: Consistency::None,
        rule: PlacementRule::Table,
        syns_per_16: 0,
        goal: None,
        floor: Some(Floor::SwapMacs),
    };

    /// Returns all kinds of traffic, baselines first.
    fn all() -> Vec<ServiceTraffic> {
        let goal = |ratio| Some(Goal::AtLeast(ratio));
        let established =
            ServiceTraffic { goal: goal(0.97), consistency: Consistency::Stateless, floor: None, ..Self::FLOOR };
        let new = ServiceTraffic { goal: goal(0.90), syns_per_16: 16, ..established };
        vec![
            Self::FLOOR,
            ServiceTraffic {
                name: "swap MACs, read the returned timestamp",
                floor: Some(Floor::ReadTsecr),
                ..Self::FLOOR
            },
            ServiceTraffic { name: "established, stateless", ..established },
            ServiceTraffic {
                name: "established, stateful",
                consistency: Consistency::Stateful,
                goal: None,
                ..established
            },
            ServiceTraffic {
                name: "established, hash-table",
                consistency: Consistency::HashTable,
                goal: None,
                ..established
            },
            ServiceTraffic { name: "new, stateless, hash or crossrss", ..new },
            ServiceTraffic {
                name: "new, stateless, crossrss-plus",
                rule: PlacementRule::LeastAssigned,
                goal: goal(0.87),
                ..new
            },
            ServiceTraffic { name: "new, stateful", consistency: Consistency::Stateful, goal: goal(0.75), ..new },
            ServiceTraffic { name: "new, hash-table", consistency: Consistency::HashTable, goal: goal(0.6), ..new },
            ServiceTraffic {
                name: "mixed: 15 established, 1 new; stateless",
                syns_per_16: 1,
                goal: None,
                ..established
            },
            ServiceTraffic {
                name: "mixed: 15 established, 1 new; stateful",
                consistency: Consistency::Stateful,
                syns_per_16: 1,
                goal: None,
                ..established
            },
        ]
    }

    /// Returns the case of packets that belong to open connections.
    fn case(&self) -> Case {
        Case::Established(self.consistency, LIVE_PACKET_COUNT)
    }

    fn setup(&self) -> anyhow::Result<BalancerSetup> {
        let entries = match self.consistency {
            Consistency::Stateful => CONNECTION_TABLE_ENTRIES,
            _ => u64::from(intf::CONNECTIONS_PER_PARTITION),
        };
        let flow_entries = match self.consistency {
            Consistency::HashTable => intf::DEFAULT_FLOW_TABLE_ENTRIES,
            _ => intf::FLOW_SET_ENTRIES,
        };
        Ok(BalancerSetup { rule: self.rule, rss_group_count: 1, entries: TableSize::try_from(entries)?, flow_entries })
    }

    /// Returns whether packet `number` is a SYN of a new client.
    fn is_new(&self, number: usize) -> bool {
        // Odd steps through the numbers below 16: each once, and no pattern that repeats within a batch.
        (number * 7 + number / 16 * 5) % 16 < self.syns_per_16
    }
}

/// Load balancer or baseline program on its own pair of devices.
struct TestEnv {
    service_traffic: ServiceTraffic,
    balancer: Option<Balancer>,
    /// Indices of the connection table's entries that are used from the start.
    open: HashSet<ConnectionIndex>,
    generator: Generator,
    tested_thread: NapiThread,
    sink: NapiThread,
}

/// Results of one kind of traffic in one round.
struct TurnResult {
    /// CPU time of the tested end's thread per frame (ns).
    cpu_ns_per_frame: f64,
    /// Rate of frames by wall-clock time, in millions per second.
    million_frames_per_second: f64,
    /// Fraction of the wall-clock time in which the tested end's thread ran.
    busy_fraction: f64,
    /// Fraction of the frames that came back to the generator's end.
    returned_fraction: f64,
}

impl TestEnv {
    /// Sets up devices and programs for one kind of traffic. `cpus`: those of the generator and of the tested end.
    fn new(lane: ServiceTraffic, number: usize, cpus: [usize; 2]) -> anyhow::Result<Self> {
        let wire = VethPair::new(number)?;
        // The baselines get frames of open connections.
        let source = Balancer::with_setup(lane.case(), lane.setup()?)?;
        let balancer = lane.floor.is_none().then_some(source);
        Self::set_up(wire, lane, balancer, cpus)
    }

    fn set_up(
        wire: VethPair,
        service_traffic: ServiceTraffic,
        balancer: Option<Balancer>,
        cpus: [usize; 2],
    ) -> anyhow::Result<Self> {
        let case = service_traffic.case();
        let packets = match &balancer {
            Some(balancer) => balancer.packets()?,
            None => vec![Default::default(); LIVE_PACKET_COUNT],
        };
        let (established, syn) = (case.frame(), syn());
        let traffic = Traffic {
            frames: [&established, &syn],
            packets: &packets,
            is_new: &|number| service_traffic.is_new(number),
        };
        let generator = Generator::new(&wire, &traffic, service_traffic.floor)?;
        let open =
            balancer.as_ref().map(|balancer| balancer.entries_by_client().into_values().collect()).unwrap_or_default();
        if let Some(balancer) = &balancer {
            balancer.attach(&wire.tested_end)?;
        }
        Ok(Self {
            service_traffic,
            open,
            generator,
            tested_thread: NapiThread::start(&wire.tested_end, cpus[1])?,
            sink: NapiThread::start(&wire.generator_end, cpus[0])?,
            balancer,
        })
    }

    fn take_turn(&self, frames: u32) -> anyhow::Result<TurnResult> {
        let counters = self.balancer.as_ref().map(Balancer::counters);
        let (tested, sink) = (self.tested_thread.usage_when_idle()?, self.sink.usage_when_idle()?);
        let start = Instant::now();
        self.generator.send(frames)?;
        let work = self.tested_thread.usage_when_idle()?.since(tested);
        let elapsed = start.elapsed().as_secs_f64();
        let returned = self.sink.usage_when_idle()?.since(sink);
        if let (Some(before), Some(balancer)) = (counters, &self.balancer) {
            self.check(&work, &before, &balancer.counters())?;
            if self.service_traffic.consistency == Consistency::Stateful {
                balancer.free_all_but(&self.open)?;
            }
        }
        ensure!(work.frames > 0, "{}: no frame arrived", self.service_traffic.name);
        Ok(TurnResult {
            cpu_ns_per_frame: work.time as f64 / work.frames as f64,
            million_frames_per_second: work.frames as f64 / elapsed / 1e6,
            busy_fraction: work.time as f64 / 1e9 / elapsed,
            returned_fraction: returned.frames as f64 / work.frames as f64,
        })
    }

    /// Checks by the counters that each frame was forwarded in the way of the service's mode.
    fn check(&self, work: &NapiUsage, before: &Counters, after: &Counters) -> anyhow::Result<()> {
        let packets = |counter: usize| after.packets[counter] - before.packets[counter];
        let (first, open) =
            (packets(intf::LB_COUNTER_NEW_CONNECTION as usize), packets(self.service_traffic.case().counter()));
        let name = self.service_traffic.name;
        ensure!(first + open == work.frames, "{name}: {first} new and {open} others of {} frames", work.frames);
        ensure!(
            (first > 0, open > 0) == (self.service_traffic.syns_per_16 > 0, self.service_traffic.syns_per_16 < 16),
            "{name}: {first} new, {open} others"
        );
        let event = intf::LB_EVENT_CONNECTION_TABLE_FULL as usize;
        let without_entry = after.events[event] - before.events[event];
        ensure!(without_entry == 0, "{name}: {without_entry} new connections found no free entry");
        Ok(())
    }
}

/// Measures live frames in a thread with its own network namespace. Fails without root, with fewer than two CPUs, or
/// when a frame is not treated as expected.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    namespace::measure_in_thread("throughput", args, measure)
}

fn measure(args: &Args) -> anyhow::Result<Report> {
    let cpus = two_cpus("coreward-lab bench throughput")?;
    namespace::enter_new()?;
    let lanes = ServiceTraffic::all().into_iter().enumerate();
    let envs = lanes.map(|(number, lane)| TestEnv::new(lane, number, cpus).context(lane.name));
    let envs: Vec<TestEnv> = envs.collect::<anyhow::Result<_>>()?;
    cpus::bind_to_cpu(THIS_THREAD, cpus[0])?;
    raise_priority(nix::unistd::gettid())?;
    let turns = interleave(envs.len(), args.rounds, |position| {
        let env = &envs[position];
        env.take_turn(args.frames).context(env.service_traffic.name)
    })?;
    let measured: Vec<(ServiceTraffic, Vec<TurnResult>)> =
        envs.iter().map(|env| env.service_traffic).zip(turns).collect();
    Ok(report(&measured, args, cpus))
}

fn report(measured: &[(ServiceTraffic, Vec<TurnResult>)], args: &Args, cpus: [usize; 2]) -> Report {
    let mut table = Table::new(&[
        "traffic",
        "rate / floor",
        "quartiles",
        "goal",
        "verdict",
        "CPU time per frame, ns",
        "above the floor, ns",
        "millions of frames per second",
        "busy, %",
        "returned, %",
    ]);
    let floor = &measured[0].1;
    for (lane, turns) in measured {
        table.add_row(row(lane, turns, floor));
    }
    Report { name: "throughput", title: "Live frames", about: about(args, cpus), tables: vec![table] }
}

fn row(lane: &ServiceTraffic, turns: &[TurnResult], floor: &[TurnResult]) -> [Cell; 10] {
    let of = |turns: &[TurnResult], of: fn(&TurnResult) -> f64| -> RoundTimes { turns.iter().map(of).collect() };
    let paired = |ratio: fn(&TurnResult, &TurnResult) -> f64| -> RoundTimes {
        turns.iter().zip(floor).map(|(turn, floor)| ratio(turn, floor)).collect()
    };
    let by_time = paired(|turn, floor| floor.cpu_ns_per_frame / turn.cpu_ns_per_frame);
    let [goal, verdict] = goal_cells(lane.goal, median_of(&by_time));
    [
        lane.name.into(),
        Cell::Text(format!("{:.2}", median_of(&by_time))),
        quartiles_with(&by_time, 2).into(),
        goal,
        verdict,
        median_of(&of(turns, |turn| turn.cpu_ns_per_frame)).into(),
        median_of(&paired(|turn, floor| turn.cpu_ns_per_frame - floor.cpu_ns_per_frame)).into(),
        median_of(&of(turns, |turn| turn.million_frames_per_second)).into(),
        (median_of(&of(turns, |turn| turn.busy_fraction)) * 100.0).into(),
        (median_of(&of(turns, |turn| turn.returned_fraction)) * 100.0).into(),
    ]
}

fn about(args: &Args, cpus: [usize; 2]) -> String {
    format!(
        "A thread on CPU {} redirects live frames (BPF_F_TEST_XDP_LIVE_FRAMES) into one end of a veth pair. At the \
         other end a NAPI thread on CPU {} runs the program under test as native XDP; frames that it returns are \
         dropped at the first end, on the generator's CPU. {} rounds of {} frames per kind of traffic, interleaved; \
         medians over the rounds. CPU time is that of the NAPI thread, with veth's receive path and XDP_TX; where it \
         waits for the generator, its wake-ups count. `swap MACs` is the floor: the ratio is the floor's CPU time per \
         frame divided by the other's, round by round. {} connections are open; each SYN is of a new client. A frame's \
         memory was written on the other CPU; behind a NIC it is in the shared cache.",
        cpus[0], cpus[1], args.rounds, args.frames, LIVE_PACKET_COUNT,
    )
}
