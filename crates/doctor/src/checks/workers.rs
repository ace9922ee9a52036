//! Checks of the services' processes.

use coreward_agent::config::Steer;
use coreward_agent::steering::assign::MAX_PINNED_CPUS;
use coreward_model::tuple::Protocol;

use crate::facts::{Facts, Service, Sockets};
use crate::finding::Finding;

fn readable_services(facts: &Facts) -> impl Iterator<Item = (&Service, &Result<Sockets, String>)> {
    facts.services.iter().filter_map(|service| Some((service, service.sockets.as_ref()?)))
}

fn describe(service: &Service) -> String {
    format!("{} at {}/{}", service.name, service.address.socket, service.address.protocol.name())
}

pub fn listeners(facts: &Facts) -> Vec<Finding> {
    let queues =
        facts.device.as_ref().and_then(|device| device.channels).map_or(1, |channels| usize::from(channels.receive));
    let steers = facts.settings.steer != Steer::Off;
    readable_services(facts).map(|(service, sockets)| check_service(service, sockets, queues, steers)).collect()
}

fn check_service(service: &Service, sockets: &Result<Sockets, String>, queues: usize, steers: bool) -> Finding {
    let name = describe(service);
    let sockets = match sockets {
        Ok(sockets) => sockets,
        Err(reason) => return Finding::unknown(format!("{name}: {reason}")),
    };
    let count = sockets.count;
    if count == 0 {
        let kind = if service.address.protocol == Protocol::Tcp { "refused" } else { "answered by ICMP" };
        let why = format!("new connections that arrive here are {kind}");
        return Finding::fault(format!("{name}: no process listens"), &why)
            .with_remediation("start the server program, or drain this server: `coreward drain NAME`");
    }
    let why = "the kernel selects the worker: another core than the selected one may serve a connection";
    let nginx = format!(
        "one socket per worker with SO_REUSEPORT (nginx: `listen {} reuseport`), or `steer = \"off\"`",
        service.address.socket
    );
    if steers && sockets.has_reuseport == Some(false) {
        return Finding::warning(format!("{name}: no SO_REUSEPORT (sockets: {count})"), why).with_remediation(nginx);
    }
    if steers && count < queues {
        return Finding::warning(format!("{name}: sockets: {count}, receive queues: {queues}"), why)
            .with_remediation(nginx);
    }
    Finding::ok(format!("{name}: sockets: {count}"))
}

pub fn polling(facts: &Facts) -> Vec<Finding> {
    if !facts.settings.load_by_cpu_time {
        return vec![];
    }
    if facts.polling_threads.is_empty() {
        return vec![Finding::ok("no pinned thread polls")];
    }
    let threads: Vec<String> = facts
        .polling_threads
        .iter()
        .map(|polling| format!("{} (thread {}) on CPU {}", polling.name, polling.thread_id, polling.cpu))
        .collect();
    let found = format!("threads that never wait (full load, or polling): {}", threads.join(", "));
    let why = "the CPU of a server that polls (DPDK, AF_XDP) is busy all the time, whatever its load";
    vec![Finding::warning(found, why).with_remediation(
        "if it polls: let it publish its load, and set `load = { source = \"published\", path = \"FILE\" }` in the \
         agent's file",
    )]
}

pub fn pinned(facts: &Facts) -> Vec<Finding> {
    if facts.settings.steer != Steer::Affinity {
        return vec![];
    }
    let of = |(service, sockets): (&Service, &Result<Sockets, String>)| {
        let sockets = sockets.as_ref().ok().filter(|sockets| sockets.count > 0)?;
        let name = describe(service);
        if sockets.worker_cpus.is_empty() {
            return Some(Finding::unknown(format!("{name}: no process waits for its sockets")));
        }
        // On two CPUs a core with its sibling is the whole machine; one CPU leaves no choice.
        let largest = MAX_PINNED_CPUS.min(facts.cpu_count.saturating_sub(1)).max(1);
        let free = sockets.worker_cpus.iter().filter(|cpus| cpus.len() > largest).count();
        if free == 0 {
            return Some(Finding::ok(format!(
                "{name}: {} workers, each on a CPU of its own",
                sockets.worker_cpus.len()
            )));
        }
        let why = "the agent steers by pinned workers (`steer = \"affinity\"`): it cannot assign queues to these";
        let found = format!("{name}: {free} of {} workers may run anywhere", sockets.worker_cpus.len());
        Some(
            Finding::warning(found, why)
                .with_remediation("pin them (nginx: `worker_cpu_affinity auto;`), or `steer = \"order\"`"),
        )
    };
    readable_services(facts).filter_map(of).collect()
}
