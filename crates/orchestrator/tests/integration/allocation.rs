//! Load monitor, hints and core allocation together, in virtual time: a burst opens cores, calm closes them.

use std::num::NonZeroU16;

use coreward_model::dispatch::{CoreAssignment, Epoch, ReservedCores, ScaleDownCondition, ScaleUpCondition};
use coreward_orchestrator::engine::EngineConfig;
use coreward_runtime::allocation::CoreAllocator;
use coreward_runtime::message::HintTrigger;
use coreward_runtime::worker::Worker;

use crate::engine::{TestEngine, config};

const CORE_COUNT: u16 = 4;
const EPOCH: u64 = 16;

/// Returns for each core the services that run on it, as digits.
fn assignment(bench: &TestEngine) -> [String; CORE_COUNT as usize] {
    let ranks = bench.engine.dispatch_policy().ranks();
    let services = |core| ['0', '1'].into_iter().zip(0..).filter(move |(_, service)| ranks.is_enabled(*service, core));
    std::array::from_fn(|core| services(core as u16).map(|(name, _)| name).collect())
}

/// Checks the load monitors at time `now`, and lets a worker with a hint act on it.
fn check_monitors(bench: &mut TestEngine, allocator: &CoreAllocator, workers: &mut [Worker<'_>], now: u64) {
    bench.engine.check_monitors(now);
    for worker in workers {
        while let Some(hint) = worker.next_hint() {
            allocator.apply_hint(hint, worker).unwrap();
        }
    }
    bench.poll(now);
    bench.check_accounts();
}

/// Completes all requests at all cores.
fn complete_all(bench: &mut TestEngine, workers: &mut [Worker<'_>], now: u64) {
    while (0..CORE_COUNT).any(|core| bench.engine.dispatch_policy().ranks().core_request_count(core) > 0) {
        for worker in &mut *workers {
            while let Some(request) = worker.take_request().unwrap() {
                worker.respond(&request, b"").unwrap();
            }
        }
        bench.poll(now);
    }
}

/// Returns the assignments at the start, during a burst of service 0, and after calm epochs.
fn assignments(kind: CoreAssignment) -> Vec<[String; CORE_COUNT as usize]> {
    let engine = EngineConfig { core_count: CORE_COUNT, rank_bound: NonZeroU16::new(1).unwrap(), ..config() };
    let mut bench = TestEngine::new(&engine);
    let runtime = bench.runtime();
    let allocator = CoreAllocator::new(kind, CORE_COUNT, ReservedCores([1, 1]));
    let mut workers: Vec<Worker<'_>> = (0..CORE_COUNT).map(|core| bench.attach(&runtime, core)).collect();
    workers.iter_mut().for_each(|worker| allocator.attach(worker).unwrap());
    let epoch = Epoch::power_of_two(4).unwrap();
    let down = ScaleDownCondition { epoch, threshold: 0, calm_epochs: 2 };
    for trigger in [HintTrigger::ScaleUp(ScaleUpCondition { epoch }), HintTrigger::ScaleDown(down)] {
        workers[0].enable_load_monitor(0, trigger).unwrap();
    }
    bench.poll(0);
    let mut found = vec![assignment(&bench)];
    (0..8).for_each(|_| bench.submit(1, 0, b"x"));
    for check in 1..=4 {
        check_monitors(&mut bench, &allocator, &mut workers, check * EPOCH);
    }
    found.push(assignment(&bench));
    complete_all(&mut bench, &mut workers, 4 * EPOCH + 1);
    for check in 5..=12 {
        check_monitors(&mut bench, &allocator, &mut workers, check * EPOCH);
    }
    found.push(assignment(&bench));
    assert_eq!((bench.counters(0).received, bench.counters(0).lost), (8, 0));
    assert_eq!(bench.counters(0).completed + bench.counters(0).dropped, 8);
    assert_eq!((bench.engine.core_counters().bad_messages, bench.engine.core_counters().bad_feedback), (0, 0));
    found
}

#[test]
fn dedicated_cores_change_hands_up_to_the_reserved_ones() {
    let expected = [["0", "0", "1", "1"], ["0", "0", "0", "1"], ["1", "1", "0", "1"]];
    assert_eq!(assignments(CoreAssignment::Dedicated), expected.map(|cores| cores.map(str::to_owned)));
}

#[test]
fn own_cores_of_hybrid_follow_the_load() {
    let expected = [["0", "01", "01", "1"], ["0", "0", "0", "1"], ["01", "01", "0", "1"]];
    assert_eq!(assignments(CoreAssignment::Hybrid), expected.map(|cores| cores.map(str::to_owned)));
}

#[test]
fn complete_share_ignores_hints() {
    let found = assignments(CoreAssignment::CompleteShare);
    assert!(found.iter().flatten().all(|services| services == "01"), "{found:?}");
}
