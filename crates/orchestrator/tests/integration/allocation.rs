//! Tests load monitors, hints and core allocation together, in virtual time. A burst of requests enables services on
//! more cores, and calm periods disable them.

use std::num::NonZeroU16;

use coreward_model::dispatch::{
    CoreAssignmentMode, LoadCheckInterval, ReservedCores, ScaleDownCondition, ScaleUpCondition,
};
use coreward_orchestrator::dispatch_engine::DispatchEngineConfig;
use coreward_runtime::allocation::SharedCoreAllocator;
use coreward_runtime::worker::Worker;
use coreward_runtime::worker_message::LoadHintTrigger;

use crate::engine::{TestEngine, two_service_engine_config};

const CORE_COUNT: u16 = 4;
const LOAD_MONITOR_EPOCH_NS: u64 = 16;

/// Returns for each core the numbers of the services that are enabled on it, as a string of digits.
fn enabled_services_by_core(test_engine: &TestEngine) -> [String; CORE_COUNT as usize] {
    let ranks = test_engine.engine.dispatch_policy().ranks();
    let services_of_core =
        |core| ['0', '1'].into_iter().zip(0..).filter(move |(_, service)| ranks.is_service_enabled(*service, core));
    std::array::from_fn(|core| services_of_core(core as u16).map(|(name, _)| name).collect())
}

/// Checks the load monitors at time `now_ns`, and lets each worker that gets a hint act on it.
fn check_monitors_and_apply_hints(
    test_engine: &mut TestEngine,
    allocator: &SharedCoreAllocator,
    workers: &mut [Worker<'_>],
    now_ns: u64,
) {
    test_engine.engine.check_load_monitors(now_ns);
    for worker in workers {
        while let Some(hint) = worker.next_hint() {
            allocator.apply_hint(hint, worker).unwrap();
        }
    }
    test_engine.poll(now_ns);
    test_engine.assert_request_counts_add_up();
}

fn complete_all_requests(test_engine: &mut TestEngine, workers: &mut [Worker<'_>], now_ns: u64) {
    while (0..CORE_COUNT)
        .any(|core| test_engine.engine.dispatch_policy().ranks().core_outstanding_request_count(core) > 0)
    {
        for worker in &mut *workers {
            while let Some(request) = worker.take_request().unwrap() {
                worker.respond(&request, b"").unwrap();
            }
        }
        test_engine.poll(now_ns);
    }
}

/// Returns each core's services at three times: at the start, during a burst for service 0, and after a pause.
fn core_assignments_over_time(assignment_mode: CoreAssignmentMode) -> Vec<[String; CORE_COUNT as usize]> {
    let engine_config = DispatchEngineConfig {
        core_count: CORE_COUNT,
        rank_bound: NonZeroU16::new(1).unwrap(),
        ..two_service_engine_config()
    };
    let mut test_engine = TestEngine::new(&engine_config);
    let runtime = test_engine.connect_runtime();
    let allocator = SharedCoreAllocator::new(assignment_mode, CORE_COUNT, ReservedCores([1, 1]));
    let mut workers: Vec<Worker<'_>> = (0..CORE_COUNT).map(|core| test_engine.attach_worker(&runtime, core)).collect();
    workers.iter_mut().for_each(|worker| allocator.enable_assigned_services(worker).unwrap());
    let monitor_epoch = LoadCheckInterval::power_of_two(4).unwrap();
    let scale_down_condition =
        ScaleDownCondition { epoch_length: monitor_epoch, max_calm_queue_length: 0, required_calm_epochs: 2 };
    for trigger in [
        LoadHintTrigger::ScaleUp(ScaleUpCondition { epoch_length: monitor_epoch }),
        LoadHintTrigger::ScaleDown(scale_down_condition),
    ] {
        workers[0].enable_load_monitor(0, trigger).unwrap();
    }
    test_engine.poll(0);
    let mut assignments = vec![enabled_services_by_core(&test_engine)];
    (0..8).for_each(|_| test_engine.submit_request(1, 0, b"x"));
    for check in 1..=4 {
        check_monitors_and_apply_hints(&mut test_engine, &allocator, &mut workers, check * LOAD_MONITOR_EPOCH_NS);
    }
    assignments.push(enabled_services_by_core(&test_engine));
    complete_all_requests(&mut test_engine, &mut workers, 4 * LOAD_MONITOR_EPOCH_NS + 1);
    for check in 5..=12 {
        check_monitors_and_apply_hints(&mut test_engine, &allocator, &mut workers, check * LOAD_MONITOR_EPOCH_NS);
    }
    assignments.push(enabled_services_by_core(&test_engine));
    assert_eq!(
        (test_engine.service_counters(0).received_requests, test_engine.service_counters(0).lost_requests),
        (8, 0)
    );
    assert_eq!(
        test_engine.service_counters(0).completed_requests + test_engine.service_counters(0).dropped_requests,
        8
    );
    assert_eq!(
        (test_engine.engine.core_counters().invalid_messages, test_engine.engine.core_counters().rejected_feedback),
        (0, 0)
    );
    assignments
}

#[test]
fn dedicated_cores_move_between_services_except_reserved_ones() {
    let expected_assignments = [["0", "0", "1", "1"], ["0", "0", "0", "1"], ["1", "1", "0", "1"]];
    assert_eq!(
        core_assignments_over_time(CoreAssignmentMode::Dedicated),
        expected_assignments.map(|cores| cores.map(str::to_owned))
    );
}

#[test]
fn hybrid_assignment_follows_the_load() {
    let expected_assignments = [["0", "01", "01", "1"], ["0", "0", "0", "1"], ["01", "01", "0", "1"]];
    assert_eq!(
        core_assignments_over_time(CoreAssignmentMode::Hybrid),
        expected_assignments.map(|cores| cores.map(str::to_owned))
    );
}

#[test]
fn complete_share_assignment_ignores_hints() {
    let assignments = core_assignments_over_time(CoreAssignmentMode::CompleteShare);
    assert!(assignments.iter().flatten().all(|services| services == "01"), "{assignments:?}");
}
