//! Decisions of the engine with a thread of workers: recorded as clients see them, then replayed on the model.
//!
//! The long run: `COREWARD_DECISIONS=100000000 cargo test -p coreward-orchestrator --test integration replay`.

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_model::dispatch::{
    JoinBoundedShortestRankedQueue, Lambda, RankArrays, RankRule, RankedService, Ranking, RateLimit, ReleasedRequest,
    Selection,
};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_orchestrator::engine::EngineConfig;
use coreward_runtime::RuntimeError;
use coreward_runtime::worker::Runtime;

use crate::engine::{TestEngine, config};

const CORE_COUNT: u16 = 16;
const SERVICE_COUNT: usize = 2;
const CAPACITY: usize = 256;
/// Environment variable with the number of decisions of a test run.
const DECISIONS_VARIABLE: &str = "COREWARD_DECISIONS";
const DECISION_COUNT: u64 = 100_000;
/// Number of records that are replayed at once.
const BATCH: usize = 1 << 20;
/// Time without a response after which the test fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Record of an input of the engine, in the order of processing, or of an observed result.
#[derive(Debug, Clone, Copy)]
enum Record {
    /// The next request of a service arrives at the engine.
    Submit { now: u64, service: u8 },
    /// A core responds to the request with this number.
    Response { service: u8, core: u16, number: u64 },
    /// A service is enabled or disabled on a core.
    Enabled { service: u8, core: u16, is_enabled: bool },
    /// All cores have been polled, so that waiting requests are sent.
    Dispatch { now: u64 },
}

/// Replay of records on the model, with the requests that the model has sent.
struct Replay {
    model: JoinBoundedShortestRankedQueue<u64>,
    /// Factor, in thousandths, of a request of one service (column) in the rank of another service (row).
    weights: [[u32; SERVICE_COUNT]; SERVICE_COUNT],
    bound: u32,
    enabled: [[bool; SERVICE_COUNT]; CORE_COUNT as usize],
    /// Numbers of the outstanding requests by core and service, in order.
    outstanding_requests: [[VecDeque<u64>; SERVICE_COUNT]; CORE_COUNT as usize],
    next_number: u64,
    dropped: [u64; SERVICE_COUNT],
    decision_count: u64,
}

impl Replay {
    fn new(config: &EngineConfig, lambda: Lambda) -> Self {
        let ranked = [0, 1].map(|priority| RankedService { priority, lambda });
        let ranks = RankArrays::new(CORE_COUNT, &ranked, config.rank_rule, config.rank_bound);
        let mut model = JoinBoundedShortestRankedQueue::with_ranks(ranks, &config.scheduler).unwrap();
        for core in 0..CORE_COUNT {
            (0..SERVICE_COUNT as u8).for_each(|service| model.set_enabled(service, core, false));
        }
        let weight = |own: usize, other: usize| match config.rank_rule {
            RankRule::Ranked if other > own => (lambda.get() * 1000.0).round() as u32,
            RankRule::PerService if other != own => 0,
            _ => 1000,
        };
        Self {
            model,
            weights: [0, 1].map(|own| [0, 1].map(|other| weight(own, other))),
            bound: u32::from(config.rank_bound.get()) * 1000,
            enabled: Default::default(),
            outstanding_requests: Default::default(),
            next_number: 0,
            dropped: [0; SERVICE_COUNT],
            decision_count: 0,
        }
    }

    /// Applies a record. Fails when the model, or the search for the least rank, decides differently.
    fn apply(&mut self, record: Record) -> Result<(), String> {
        match record {
            Record::Submit { now, service } => {
                let submitted = self.model.submit(now, service, self.next_number);
                self.next_number += 1;
                if let Some((service, _)) = submitted.dropped {
                    self.dropped[usize::from(service)] += 1;
                }
                submitted.sent.map_or(Ok(()), |(release, number)| self.send(release, number))
            }
            Record::Response { service, core, number } => {
                let expected = self.outstanding_requests[usize::from(core)][usize::from(service)].pop_front();
                if expected != Some(number) {
                    return Err(format!("core {core}, service {service}: request {number}, the model: {expected:?}"));
                }
                self.model.record_feedback(service, core, 1).map_err(|error| error.to_string())
            }
            Record::Enabled { service, core, is_enabled } => {
                self.enabled[usize::from(core)][usize::from(service)] = is_enabled;
                self.model.set_enabled(service, core, is_enabled);
                Ok(())
            }
            Record::Dispatch { now } => {
                while let Some((release, number)) = self.model.next(now) {
                    self.send(release, number)?;
                }
                Ok(())
            }
        }
    }

    fn send(&mut self, ReleasedRequest { service, core }: ReleasedRequest, number: u64) -> Result<(), String> {
        let least = self.least_ranked(service);
        if least != Some(core) {
            return Err(format!("request {number} of service {service}: core {core}, of least rank is {least:?}"));
        }
        self.outstanding_requests[usize::from(core)][usize::from(service)].push_back(number);
        self.decision_count += 1;
        Ok(())
    }

    /// Returns the first of the cores with the least rank below the bound on which the service is enabled.
    fn least_ranked(&self, service: u8) -> Option<u16> {
        let own = usize::from(service);
        let rank = |core: usize| -> u32 {
            let weighted =
                |other: usize| self.weights[own][other] * self.outstanding_requests[core][other].len() as u32;
            (0..SERVICE_COUNT).map(weighted).sum()
        };
        let candidates = (0..CORE_COUNT.into()).filter(|core| self.enabled[*core][own]).map(|core| (rank(core), core));
        candidates.filter(|(rank, _)| *rank < self.bound).min().map(|(_, core)| core as u16)
    }
}

/// Engine whose inputs and results are recorded.
struct Recorder {
    bench: TestEngine,
    records: Vec<Record>,
    enabled: [[bool; SERVICE_COUNT]; CORE_COUNT as usize],
    submitted_count: u64,
    response_count: u64,
}

impl Recorder {
    fn new(config: &EngineConfig) -> Self {
        let records = Vec::with_capacity(BATCH);
        Self {
            bench: TestEngine::new(config),
            records,
            enabled: Default::default(),
            submitted_count: 0,
            response_count: 0,
        }
    }

    fn submit(&mut self, now: u64, service: u8) {
        self.records.push(Record::Submit { now, service });
        self.bench.engine.submit(now, service, "192.0.2.1:9".parse().unwrap(), &self.submitted_count.to_le_bytes());
        self.submitted_count += 1;
    }

    /// Polls the engine and records the results. Returns the number of responses and messages.
    fn poll(&mut self, now: u64) -> usize {
        let Self { bench, records, response_count, .. } = self;
        let received = bench.engine.poll(now, &mut |service, _, payload| {
            let (number, core) = payload.split_first_chunk().expect("a number and a core");
            let core = u16::from_le_bytes(core.try_into().unwrap());
            records.push(Record::Response { service, core, number: u64::from_le_bytes(*number) });
            *response_count += 1;
        });
        for core in 0..CORE_COUNT {
            for service in [0, 1] {
                let is_enabled = self.bench.engine.dispatch_policy().ranks().is_enabled(service, core);
                let known = &mut self.enabled[usize::from(core)][usize::from(service)];
                if std::mem::replace(known, is_enabled) != is_enabled {
                    self.records.push(Record::Enabled { service, core, is_enabled });
                }
            }
        }
        self.records.push(Record::Dispatch { now });
        received
    }

    /// Returns the number of requests in the engine and at cores.
    fn in_flight(&self) -> u64 {
        let dropped: u64 = (0..SERVICE_COUNT).map(|service| self.bench.counters(service).dropped).sum();
        self.submitted_count - self.response_count - dropped
    }

    /// Replays the records since the last call on the model, and compares counters.
    fn check(&mut self, replay: &mut Replay) {
        self.records.drain(..).try_for_each(|record| replay.apply(record)).unwrap();
        for service in 0..SERVICE_COUNT {
            let counters = self.bench.counters(service);
            assert_eq!((counters.dropped, counters.rejected, counters.lost), (replay.dropped[service], 0, 0));
            let waiting = self.bench.engine.dispatch_policy().waiting_count(service as u8);
            assert_eq!(waiting, replay.model.waiting_count(service as u8));
        }
    }
}

/// Serves all cores in one thread: responds with number and core, and randomly enables and disables services.
fn serve(runtime: &Runtime, seed: u64, stop: &AtomicBool) -> Result<(), RuntimeError> {
    let mut rng = seeded_rng(seed, 1);
    let mut draw = |below: u32| uniform_below(&mut rng, below);
    let mut workers = (0..CORE_COUNT).map(|core| runtime.worker(core)).collect::<Result<Vec<_>, _>>()?;
    for worker in &mut workers {
        [0, 1].into_iter().try_for_each(|service| worker.enable_service(service, worker.core()))?;
    }
    while !stop.load(Relaxed) {
        let core = draw(CORE_COUNT.into());
        let worker = &mut workers[core as usize];
        for _ in 0..draw(4) {
            let Some(request) = worker.take_request()? else { break };
            worker.respond(&request, &[&request.payload[..], &(core as u16).to_le_bytes()[..]].concat())?;
        }
        if draw(4096) == 0 {
            let service = draw(SERVICE_COUNT as u32) as u8;
            match draw(3) {
                0 => worker.disable_service(service, core as u16)?,
                _ => worker.enable_service(service, core as u16)?,
            }
        }
    }
    Ok(())
}

/// Runs the engine until `completed` requests are completed. `check` consumes the records repeatedly.
fn run(config: &EngineConfig, completed: u64, seed: u64, mut check: impl FnMut(&mut Recorder)) {
    let mut recorder = Recorder::new(config);
    let runtime = recorder.bench.runtime();
    let mut rng = seeded_rng(seed, 0);
    let mut draw = |below: u32| uniform_below(&mut rng, below);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers = scope.spawn(|| serve(&runtime, seed, &stop));
        let (mut now, mut progress) = (0, Instant::now());
        for turn in 1u64.. {
            if recorder.response_count >= completed {
                break;
            }
            now += u64::from(draw(20));
            // Some bursts overflow the buffer.
            let burst = if turn % 64 == 0 { 2 * CAPACITY as u32 } else { draw(4 * u32::from(CORE_COUNT)) };
            for _ in recorder.in_flight()..burst.into() {
                recorder.submit(now, u8::from(draw(3) == 0));
            }
            let before = recorder.response_count;
            if recorder.poll(now) == 0 {
                // The workers may share this CPU.
                std::thread::yield_now();
            }
            if recorder.response_count > before {
                progress = Instant::now();
            }
            assert!(progress.elapsed() < TIMEOUT && !workers.is_finished(), "no response, or no worker");
            if recorder.records.len() >= BATCH {
                check(&mut recorder);
            }
        }
        stop.store(true, Relaxed);
        while !workers.is_finished() {
            recorder.poll(now);
        }
        workers.join().unwrap().unwrap();
    });
    check(&mut recorder);
}

/// Returns configurations with each rank rule, scheduler and ranking, a rate limit, and queues of one request.
fn configs() -> Vec<EngineConfig> {
    let with = |change: &dyn Fn(&mut EngineConfig)| {
        let mut changed = EngineConfig { core_count: CORE_COUNT, rank_bound: NonZeroU16::new(4).unwrap(), ..config() };
        changed.scheduler.capacity = CAPACITY;
        change(&mut changed);
        changed
    };
    let ranked_by = |ranking: Ranking, parameters: [u32; SERVICE_COUNT]| {
        with(&|config| {
            config.scheduler.groups[0].ranking = ranking;
            for (queue, parameter) in config.scheduler.queues.iter_mut().zip(parameters) {
                queue.member.parameter = parameter;
            }
        })
    };
    vec![
        with(&|_| ()),
        with(&|config| config.rank_bound = NonZeroU16::MIN),
        with(&|config| config.rank_rule = RankRule::Global),
        with(&|config| config.rank_rule = RankRule::PerService),
        with(&|config| config.scheduler.selection = Selection::Pifo),
        ranked_by(Ranking::WeightedShare, [1, 3]),
        ranked_by(Ranking::EarliestDeadline, [50, 200]),
        with(&|config| config.scheduler.queues[0].member.limit = Some(RateLimit { interval: 1, burst: 8 })),
    ]
}

fn decisions() -> u64 {
    let Ok(text) = std::env::var(DECISIONS_VARIABLE) else { return DECISION_COUNT };
    text.parse().unwrap_or_else(|_| panic!("{DECISIONS_VARIABLE}={text:?}: expected a whole number"))
}

#[test]
fn decisions_replayed_on_the_model_are_the_same() {
    let (configs, started, mut replayed) = (configs(), Instant::now(), 0);
    let each = decisions().div_ceil(configs.len() as u64);
    for (config, seed) in configs.iter().zip(0..) {
        let mut replay = Replay::new(config, Lambda::PUBLISHED);
        run(config, each, seed, |recorder| recorder.check(&mut replay));
        assert!(replay.decision_count >= each && replay.dropped[1] > 0, "{} decisions", replay.decision_count);
        replayed += replay.decision_count;
    }
    println!("{replayed} decisions in {:.1} s", started.elapsed().as_secs_f64());
}

#[test]
fn replay_finds_decisions_by_another_rank() {
    let config = &configs()[0];
    let mut replay = Replay::new(config, Lambda::new(1.0).unwrap());
    let mut outcome = Ok(());
    run(config, 10_000, 1, |recorder| {
        outcome = recorder.records.drain(..).try_for_each(|record| replay.apply(record));
    });
    let error = outcome.expect_err("lambda differs");
    assert!(error.contains("the model"), "{error}");
}
