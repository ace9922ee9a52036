//! Records the engine's decisions with a thread of workers, as clients see them, and replays them on the model.
//!
//! A long run is: `COREWARD_DECISIONS=100000000 cargo test -p coreward-orchestrator --test integration replay`.

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_model::dispatch::{
    CoreRankRule, DispatchEligibilityRule, DispatchRateLimit, JoinBoundedShortestRankedQueue, RankArrays, RankLambda,
    RankedService, ReleasedRequest, SchedulingMemberRanking,
};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_orchestrator::dispatch_engine::DispatchEngineConfig;
use coreward_runtime::RuntimeError;
use coreward_runtime::worker::OrchestratorConnection;

use crate::engine::{TestEngine, two_service_engine_config};

const CORE_COUNT: u16 = 16;
const SERVICE_COUNT: usize = 2;
const WAITING_REQUEST_CAPACITY: usize = 256;
/// Environment variable with the number of decisions in a test run.
const DECISION_COUNT_ENV_VARIABLE: &str = "COREWARD_DECISIONS";
const DEFAULT_DECISION_COUNT: u64 = 100_000;
/// Number of records that are replayed together.
const REPLAYED_RECORDS_PER_BATCH: usize = 1 << 20;
/// Time without a response after which the test fails.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Record of an input to the engine, or of an observed result. The records have the order in which the engine processes
/// them: it polls all cores, and then dispatches waiting requests.
#[derive(Debug, Clone, Copy)]
enum EngineRecord {
    Submit { now_ns: u64, service: u8 },
    Response { service: u8, core: u16, request_number: u64 },
    EnabledChange { service: u8, core: u16, is_enabled: bool },
    Dispatch { now_ns: u64 },
}

/// Replay of the engine's records on a model of the dispatch policy, with the requests that the model has sent.
struct ModelReplay {
    policy_model: JoinBoundedShortestRankedQueue<u64>,
    /// Weight, in thousandths, of a request of one service (column) in the rank for another service (row).
    rank_weights: [[u32; SERVICE_COUNT]; SERVICE_COUNT],
    rank_bound: u32,
    is_service_enabled: [[bool; SERVICE_COUNT]; CORE_COUNT as usize],
    /// Numbers of the outstanding requests at each core and service, in the order in which they were sent.
    outstanding_requests: [[VecDeque<u64>; SERVICE_COUNT]; CORE_COUNT as usize],
    next_request_number: u64,
    dropped_request_counts: [u64; SERVICE_COUNT],
    decision_count: u64,
}

impl ModelReplay {
    fn new(config: &DispatchEngineConfig, lambda: RankLambda) -> Self {
        let ranked_services = [0, 1].map(|priority| RankedService { priority, lambda });
        let rank_arrays = RankArrays::new(CORE_COUNT, &ranked_services, config.rank_rule, config.rank_bound);
        let mut policy_model =
            JoinBoundedShortestRankedQueue::with_ranks(rank_arrays, &config.scheduler_config).unwrap();
        for core in 0..CORE_COUNT {
            (0..SERVICE_COUNT as u8).for_each(|service| policy_model.set_service_enabled(service, core, false));
        }
        let rank_weight_in_thousandths = |own_service: usize, other_service: usize| match config.rank_rule {
            CoreRankRule::Ranked if other_service > own_service => (lambda.get() * 1000.0).round() as u32,
            CoreRankRule::PerService if other_service != own_service => 0,
            _ => 1000,
        };
        Self {
            policy_model,
            rank_weights: [0, 1]
                .map(|own_service| [0, 1].map(|other_service| rank_weight_in_thousandths(own_service, other_service))),
            rank_bound: u32::from(config.rank_bound.get()) * 1000,
            is_service_enabled: Default::default(),
            outstanding_requests: Default::default(),
            next_request_number: 0,
            dropped_request_counts: [0; SERVICE_COUNT],
            decision_count: 0,
        }
    }

    /// Applies a record to the model. Fails when the model decides differently from the engine, or does not send a
    /// request to the core with the least rank.
    fn apply_record(&mut self, record: EngineRecord) -> Result<(), String> {
        match record {
            EngineRecord::Submit { now_ns: now, service } => {
                let submit_outcome = self.policy_model.submit_request(now, service, self.next_request_number);
                self.next_request_number += 1;
                if let Some((service, _)) = submit_outcome.dropped_request {
                    self.dropped_request_counts[usize::from(service)] += 1;
                }
                submit_outcome.sent_request.map_or(Ok(()), |(release, number)| self.check_sent_request(release, number))
            }
            EngineRecord::Response { service, core, request_number: number } => {
                let expected_request_number =
                    self.outstanding_requests[usize::from(core)][usize::from(service)].pop_front();
                if expected_request_number != Some(number) {
                    return Err(format!(
                        "core {core}, service {service}: request {number}, the model: {expected_request_number:?}"
                    ));
                }
                self.policy_model.record_feedback(service, core, 1).map_err(|error| error.to_string())
            }
            EngineRecord::EnabledChange { service, core, is_enabled } => {
                self.is_service_enabled[usize::from(core)][usize::from(service)] = is_enabled;
                self.policy_model.set_service_enabled(service, core, is_enabled);
                Ok(())
            }
            EngineRecord::Dispatch { now_ns: now } => {
                while let Some((release, number)) = self.policy_model.release_next_request(now) {
                    self.check_sent_request(release, number)?;
                }
                Ok(())
            }
        }
    }

    fn check_sent_request(
        &mut self,
        ReleasedRequest { service, core }: ReleasedRequest,
        request_number: u64,
    ) -> Result<(), String> {
        let least_ranked_core = self.least_ranked_core(service);
        if least_ranked_core != Some(core) {
            return Err(format!(
                "request {request_number} of service {service}: core {core}, of least rank is {least_ranked_core:?}"
            ));
        }
        self.outstanding_requests[usize::from(core)][usize::from(service)].push_back(request_number);
        self.decision_count += 1;
        Ok(())
    }

    /// Returns the first core with the least rank, among the cores that run the service and whose rank is below the
    /// bound.
    fn least_ranked_core(&self, service: u8) -> Option<u16> {
        let own_service = usize::from(service);
        let compute_core_rank = |core: usize| -> u32 {
            let weighted_request_count = |other_service: usize| {
                self.rank_weights[own_service][other_service]
                    * self.outstanding_requests[core][other_service].len() as u32
            };
            (0..SERVICE_COUNT).map(weighted_request_count).sum()
        };
        let ranks_and_cores = (0..CORE_COUNT.into())
            .filter(|core| self.is_service_enabled[*core][own_service])
            .map(|core| (compute_core_rank(core), core));
        ranks_and_cores.filter(|(rank, _)| *rank < self.rank_bound).min().map(|(_, core)| core as u16)
    }
}

struct RecordingEngine {
    test_engine: TestEngine,
    unreplayed_records: Vec<EngineRecord>,
    was_service_enabled: [[bool; SERVICE_COUNT]; CORE_COUNT as usize],
    submitted_request_count: u64,
    response_count: u64,
}

impl RecordingEngine {
    fn new(config: &DispatchEngineConfig) -> Self {
        let unreplayed_records = Vec::with_capacity(REPLAYED_RECORDS_PER_BATCH);
        Self {
            test_engine: TestEngine::new(config),
            unreplayed_records,
            was_service_enabled: Default::default(),
            submitted_request_count: 0,
            response_count: 0,
        }
    }

    fn submit_request(&mut self, now_ns: u64, service: u8) {
        self.unreplayed_records.push(EngineRecord::Submit { now_ns, service });
        self.test_engine.engine.submit_request(
            now_ns,
            service,
            "192.0.2.1:9".parse().unwrap(),
            &self.submitted_request_count.to_le_bytes(),
        );
        self.submitted_request_count += 1;
    }

    /// Submits requests until a random number of them is in flight. Some bursts are so large that they overflow the
    /// buffer.
    fn submit_burst(&mut self, now_ns: u64, round: u64, random_below: &mut impl FnMut(u32) -> u32) {
        let burst_size = if round.is_multiple_of(64) {
            2 * WAITING_REQUEST_CAPACITY as u32
        } else {
            random_below(4 * u32::from(CORE_COUNT))
        };
        for _ in self.in_flight_request_count()..burst_size.into() {
            self.submit_request(now_ns, u8::from(random_below(3) == 0));
        }
    }

    /// Polls the engine and records the results. Returns how many responses and messages arrived.
    fn poll_engine(&mut self, now_ns: u64) -> usize {
        let Self { test_engine: bench, unreplayed_records: records, response_count, .. } = self;
        let response_and_message_count = bench.engine.poll(now_ns, &mut |service, _, payload| {
            let (number, core) = payload.split_first_chunk().expect("a number and a core");
            let core = u16::from_le_bytes(core.try_into().unwrap());
            records.push(EngineRecord::Response { service, core, request_number: u64::from_le_bytes(*number) });
            *response_count += 1;
        });
        for core in 0..CORE_COUNT {
            for service in [0, 1] {
                let is_enabled = self.test_engine.engine.dispatch_policy().ranks().is_service_enabled(service, core);
                let was_enabled = &mut self.was_service_enabled[usize::from(core)][usize::from(service)];
                if std::mem::replace(was_enabled, is_enabled) != is_enabled {
                    self.unreplayed_records.push(EngineRecord::EnabledChange { service, core, is_enabled });
                }
            }
        }
        self.unreplayed_records.push(EngineRecord::Dispatch { now_ns });
        response_and_message_count
    }

    fn in_flight_request_count(&self) -> u64 {
        let dropped_request_count: u64 =
            (0..SERVICE_COUNT).map(|service| self.test_engine.service_counters(service).dropped_requests).sum();
        self.submitted_request_count - self.response_count - dropped_request_count
    }

    /// Replays the records since the last call on the model, and compares its counters with the engine's.
    fn replay_and_compare(&mut self, replay: &mut ModelReplay) {
        self.unreplayed_records.drain(..).try_for_each(|record| replay.apply_record(record)).unwrap();
        for service in 0..SERVICE_COUNT {
            let counters = self.test_engine.service_counters(service);
            assert_eq!(
                (counters.dropped_requests, counters.rejected_requests, counters.lost_requests),
                (replay.dropped_request_counts[service], 0, 0)
            );
            let waiting_request_count = self.test_engine.engine.dispatch_policy().waiting_request_count(service as u8);
            assert_eq!(waiting_request_count, replay.policy_model.waiting_request_count(service as u8));
        }
    }
}

/// Serves the requests of all cores in one thread. Each response has the numbers of the request and of the core.
/// Enables and disables services at random.
fn serve_requests_of_all_cores(
    runtime: &OrchestratorConnection,
    seed: u64,
    stop_flag: &AtomicBool,
) -> Result<(), RuntimeError> {
    let mut rng = seeded_rng(seed, 1);
    let mut random_number_below = |bound: u32| uniform_below(&mut rng, bound);
    let mut workers = (0..CORE_COUNT).map(|core| runtime.attach_worker(core)).collect::<Result<Vec<_>, _>>()?;
    for worker in &mut workers {
        [0, 1].into_iter().try_for_each(|service| worker.enable_service(service, worker.core()))?;
    }
    while !stop_flag.load(Relaxed) {
        let core = random_number_below(CORE_COUNT.into());
        let worker = &mut workers[core as usize];
        for _ in 0..random_number_below(4) {
            let Some(request) = worker.take_request()? else { break };
            worker.respond(&request, &[&request.payload[..], &(core as u16).to_le_bytes()[..]].concat())?;
        }
        if random_number_below(4096) == 0 {
            let service = random_number_below(SERVICE_COUNT as u32) as u8;
            match random_number_below(3) {
                0 => worker.disable_service(service, core as u16)?,
                _ => worker.enable_service(service, core as u16)?,
            }
        }
    }
    Ok(())
}

/// Runs the engine until `completed_request_count` requests are completed. Meanwhile calls `check` repeatedly, so that
/// it can consume the events recorded so far.
fn run_engine(
    config: &DispatchEngineConfig,
    completed_request_count: u64,
    seed: u64,
    mut check: impl FnMut(&mut RecordingEngine),
) {
    let mut recorder = RecordingEngine::new(config);
    let runtime = recorder.test_engine.connect_runtime();
    let mut rng = seeded_rng(seed, 0);
    let mut random_number_below = |bound: u32| uniform_below(&mut rng, bound);
    let stop_flag = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving_thread = scope.spawn(|| serve_requests_of_all_cores(&runtime, seed, &stop_flag));
        let (mut now, mut last_progress_at) = (0, Instant::now());
        for round in 1u64.. {
            if recorder.response_count >= completed_request_count {
                break;
            }
            now += u64::from(random_number_below(20));
            recorder.submit_burst(now, round, &mut random_number_below);
            let initial_response_count = recorder.response_count;
            if recorder.poll_engine(now) == 0 {
                // The workers may share this CPU.
                std::thread::yield_now();
            }
            if recorder.response_count > initial_response_count {
                last_progress_at = Instant::now();
            }
            assert!(
                last_progress_at.elapsed() < RESPONSE_TIMEOUT && !serving_thread.is_finished(),
                "no response, or no worker"
            );
            if recorder.unreplayed_records.len() >= REPLAYED_RECORDS_PER_BATCH {
                check(&mut recorder);
            }
        }
        stop_flag.store(true, Relaxed);
        while !serving_thread.is_finished() {
            recorder.poll_engine(now);
        }
        serving_thread.join().unwrap().unwrap();
    });
    check(&mut recorder);
}

/// Returns engine configurations with each rank rule, scheduler and ranking, one with a rate limit, and one with short
/// queues.
fn engine_configs() -> Vec<DispatchEngineConfig> {
    let changed_config = |change: &dyn Fn(&mut DispatchEngineConfig)| {
        let mut config = DispatchEngineConfig {
            core_count: CORE_COUNT,
            rank_bound: NonZeroU16::new(4).unwrap(),
            ..two_service_engine_config()
        };
        config.scheduler_config.max_waiting_requests = WAITING_REQUEST_CAPACITY;
        change(&mut config);
        config
    };
    let ranked_config = |ranking: SchedulingMemberRanking, parameters: [u32; SERVICE_COUNT]| {
        changed_config(&|config| {
            config.scheduler_config.groups[0].service_ranking = ranking;
            for (queue, parameter) in config.scheduler_config.queues.iter_mut().zip(parameters) {
                queue.parameters.priority_weight_or_deadline = parameter;
            }
        })
    };
    vec![
        changed_config(&|_| ()),
        changed_config(&|config| config.rank_bound = NonZeroU16::MIN),
        changed_config(&|config| config.rank_rule = CoreRankRule::Global),
        changed_config(&|config| config.rank_rule = CoreRankRule::PerService),
        changed_config(&|config| config.scheduler_config.eligibility_rule = DispatchEligibilityRule::Pifo),
        ranked_config(SchedulingMemberRanking::WeightedShare, [1, 3]),
        ranked_config(SchedulingMemberRanking::EarliestDeadline, [50, 200]),
        changed_config(&|config| {
            config.scheduler_config.queues[0].parameters.rate_limit =
                Some(DispatchRateLimit { token_interval: 1, burst_tokens: 8 })
        }),
    ]
}

fn decision_count_from_environment() -> u64 {
    let Ok(text) = std::env::var(DECISION_COUNT_ENV_VARIABLE) else { return DEFAULT_DECISION_COUNT };
    text.parse().unwrap_or_else(|_| panic!("{DECISION_COUNT_ENV_VARIABLE}={text:?}: expected a whole number"))
}

#[test]
fn model_makes_the_same_decisions_as_the_engine() {
    let (configs, started, mut replayed) = (engine_configs(), Instant::now(), 0);
    let decisions_per_config = decision_count_from_environment().div_ceil(configs.len() as u64);
    for (config, seed) in configs.iter().zip(0..) {
        let mut replay = ModelReplay::new(config, RankLambda::PAPER_VALUE);
        run_engine(config, decisions_per_config, seed, |recorder| recorder.replay_and_compare(&mut replay));
        assert!(
            replay.decision_count >= decisions_per_config && replay.dropped_request_counts[1] > 0,
            "{} decisions",
            replay.decision_count
        );
        replayed += replay.decision_count;
    }
    println!("{replayed} decisions in {:.1} s", started.elapsed().as_secs_f64());
}

#[test]
fn replay_detects_decisions_with_another_lambda() {
    let config = &engine_configs()[0];
    let mut replay = ModelReplay::new(config, RankLambda::new(1.0).unwrap());
    let mut replay_result = Ok(());
    run_engine(config, 10_000, 1, |recorder| {
        replay_result = recorder.unreplayed_records.drain(..).try_for_each(|record| replay.apply_record(record));
    });
    let error = replay_result.expect_err("lambda differs");
    assert!(error.contains("the model"), "{error}");
}
