//! Answers as JSON: the messages of `crates/wire/proto/coreward.proto` by the names of their fields; addresses and keys
//! as people write them.

use std::collections::{BTreeMap, HashMap};

use coreward_wire::v1;
use serde_json::{Value, json};

use super::{shown_ip, shown_key, shown_service};

/// With line breaks.
pub fn pretty(value: &Value) -> String {
    format!("{value:#}")
}

/// Always in the same order.
fn sorted(counts: &HashMap<String, u64>) -> BTreeMap<&String, &u64> {
    counts.iter().collect()
}

pub fn status(reply: &v1::StatusReply) -> Value {
    json!({
        "configuration_generation": reply.configuration_generation,
        "report_interval_ms": reply.report_interval_ms,
        "accepted_reports": reply.accepted_reports,
        "refused_reports": sorted(&reply.refused_reports),
        "services": reply.services.iter().map(service).collect::<Vec<_>>(),
        "servers": reply.servers.iter().map(server).collect::<Vec<_>>(),
        "load_balancers": reply.load_balancers.iter().map(load_balancer).collect::<Vec<_>>(),
        "racks": reply.racks.iter().map(rack).collect::<Vec<_>>(),
        "keys": reply.keys.as_ref().map(keys),
    })
}

fn service(service: &v1::ServiceStatus) -> Value {
    let group = |group: &v1::RssGroupStatus| {
        json!({
            "key": shown_key(&group.key),
            "key_fingerprint": group.key_fingerprint,
            "servers": group.servers,
        })
    };
    json!({
        "name": service.name,
        "address": shown_service(service.address.as_ref()),
        "policy": service.policy,
        "consistency": service.mode.as_ref().map(|mode| &mode.consistency),
        "timestamps": service.mode.as_ref().map(|mode| &mode.timestamps),
        "bucket_count": service.bucket_count,
        "table_generation": service.table_generation,
        "table_age_ms": service.table_age_ms,
        "servers": service.servers,
        "rss_groups": service.rss_groups.iter().map(group).collect::<Vec<_>>(),
        "warnings": service.warnings,
        "members": service.members.iter().map(member).collect::<Vec<_>>(),
        "check": (!service.check.is_empty()).then_some(&service.check),
        "when_all_down": service.when_all_down,
        "failing_open": service.failing_open,
    })
}

fn member(member: &v1::MemberStatus) -> Value {
    let check = |check: &v1::CheckStatus| {
        let health = check.health.clone().unwrap_or_default();
        json!({
            "load_balancer": check.load_balancer,
            "up": health.up,
            "since_ms": health.since_ms,
            "error": health.error,
            "latency_us": health.latency_us,
            "checks": health.checks,
            "failures": health.failures,
        })
    };
    json!({
        "server": member.server,
        "state": member.state,
        "reason": member.reason,
        "state_for_ms": member.state_for_ms,
        "checks": member.checks.iter().map(check).collect::<Vec<_>>(),
    })
}

fn server(server: &v1::ServerStatus) -> Value {
    let rss = server.rss.as_ref().map(|rss| {
        json!({
            "source": rss.source,
            "key": shown_key(&rss.key),
            "key_fingerprint": server.rss_key_fingerprint,
            "indirection_table": rss.indirection_table,
        })
    });
    json!({
        "name": server.name,
        "id": server.id,
        "address": shown_ip(&server.address),
        "state": server.state,
        "state_reason": server.state_reason,
        "state_for_ms": server.state_for_ms,
        "reports": server.reports,
        "core_load": server.core_load,
        "report_age_ms": server.report_age_ms,
        "open_connections": server.open_connections,
        "drained_by": (!server.drained_by.is_empty()).then_some(&server.drained_by),
        "connections": server.connections.as_ref().map(|counted| json!({"age_ms": counted.age_ms, "services": counted.services})),
        "rss": rss,
        "rss_matched": server.rss_matched,
        "rss_mismatched": server.rss_mismatched,
        "warnings": server.warnings,
        "weight": server.weight,
        "capacity": server.capacity,
        "configuration_generation": server.configuration_generation,
        "counters": sorted(&server.counters),
        "dispatch": server.dispatch.iter().map(dispatched_service).collect::<Vec<_>>(),
    })
}

/// As `coreward dispatch --status --format json` has it.
fn dispatched_service(service: &v1::DispatchedService) -> Value {
    let worker = |worker: &v1::DispatchedWorker| {
        json!({
            "worker": worker.worker,
            "pid": worker.pid,
            "outstanding": worker.outstanding,
            "outstanding_work_us": worker.outstanding_work_ns as f64 / 1e3,
            "queued": worker.queued,
            "dispatched": worker.dispatched,
            "completed": worker.completed,
            "repaired": worker.repaired,
            "dropped": worker.dropped,
            "eligible": worker.eligible,
        })
    };
    json!({
        "listen": service.listen,
        "policy": service.policy,
        "workers": service.workers.iter().map(worker).collect::<Vec<_>>(),
        "counters": sorted(&service.counters),
    })
}

fn rack(rack: &v1::RackStatus) -> Value {
    json!({ "name": rack.name, "version": rack.version, "age_ms": rack.age_ms, "servers": rack.servers })
}

fn load_balancer(balancer: &v1::LoadBalancerStatus) -> Value {
    let state = balancer.state.as_ref().map(|state| {
        json!({
            "table_generations": sorted(&state.table_generations),
            "unresolved_servers": state.unresolved_servers,
            "counters": sorted(&state.counters),
            "xdp_mode": state.xdp_mode,
            "configuration_generation": state.configuration_generation,
            "events": sorted(&state.events),
            "connections": state.connections,
            "unresolved_load_balancers": state.unresolved_load_balancers,
            "server_clocks": state.server_clocks.iter().map(server_clock).collect::<Vec<_>>(),
            "warnings": state.warnings,
        })
    });
    json!({
        "name": balancer.name,
        "state": state,
        "state_age_ms": balancer.state_age_ms,
        "connected": balancer.connected,
        "alive": balancer.alive,
        "owner": balancer.owner,
        "address": (!balancer.address.is_empty()).then(|| shown_ip(&balancer.address)),
    })
}

fn server_clock(clock: &v1::ServerClock) -> Value {
    json!({
        "service": clock.service,
        "server": clock.server,
        "state": clock.state,
        "syn_acks": clock.syn_acks,
        "with_timestamps": clock.with_timestamps,
        "disagreed": clock.disagreed,
        "problem": (!clock.problem.is_empty()).then_some(&clock.problem),
    })
}

/// Without the secrets: those never leave the controller but to those who need them.
pub fn keys(keys: &v1::KeysStatus) -> Value {
    json!({
        "current": keys.current,
        "current_since_unix_s": keys.current_since_unix_s,
        "phase": keys.phase,
        "generation": keys.generation,
        "waiting_for": keys.waiting_for,
        "shortest_life_s": keys.shortest_life_s,
        "rotation_interval_s": keys.rotation_interval_s,
    })
}

pub fn explain(reply: &v1::ExplainReply) -> Value {
    let server = |server: &v1::ExplainedServer| {
        json!({
            "name": server.name,
            "id": server.id,
            "hash": server.hash,
            "bucket": server.bucket,
            "core": server.core,
            "core_load": server.core_load,
            "eligible": server.eligible,
        })
    };
    json!({
        "service": reply.service,
        "policy": reply.policy,
        "table_generation": reply.table_generation,
        "servers": reply.servers.iter().map(server).collect::<Vec<_>>(),
        "chosen_server": reply.chosen_server,
        "reason": reply.reason,
    })
}
