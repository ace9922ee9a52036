//! Checks of the processes that serve the services.

use coreward_agent::config::ConnectionSteeringMode;
use coreward_agent::steering::socket_assignment::MAX_CPUS_OF_PINNED_WORKER;
use coreward_model::tuple::TransportProtocol;

use crate::facts::{MachineFacts, ServiceFacts, ServiceSocketFacts};
use crate::finding::Finding;

fn services_with_sockets(
    facts: &MachineFacts,
) -> impl Iterator<Item = (&ServiceFacts, &Result<ServiceSocketFacts, String>)> {
    facts.services.iter().filter_map(|service| Some((service, service.sockets.as_ref()?)))
}

fn describe_service(service: &ServiceFacts) -> String {
    format!("{} at {}/{}", service.name, service.address.vip_and_port, service.address.protocol.name())
}

pub fn check_listeners(facts: &MachineFacts) -> Vec<Finding> {
    let receive_queue_count = facts
        .device
        .as_ref()
        .and_then(|device| device.queue_counts)
        .map_or(1, |channels| usize::from(channels.receive_queues));
    let is_steering_on = facts.settings.steering_mode != ConnectionSteeringMode::Off;
    services_with_sockets(facts)
        .map(|(service, sockets)| check_service_listeners(service, sockets, receive_queue_count, is_steering_on))
        .collect()
}

fn check_service_listeners(
    service: &ServiceFacts,
    sockets: &Result<ServiceSocketFacts, String>,
    receive_queue_count: usize,
    is_steering_on: bool,
) -> Finding {
    let service_description = describe_service(service);
    let sockets = match sockets {
        Ok(sockets) => sockets,
        Err(reason) => return Finding::unknown(format!("{service_description}: {reason}")),
    };
    let socket_count = sockets.socket_count;
    if socket_count == 0 {
        let effect_on_connections =
            if service.address.protocol == TransportProtocol::Tcp { "refused" } else { "answered by ICMP" };
        let consequence = format!("new connections that arrive here are {effect_on_connections}");
        return Finding::fault(format!("{service_description}: no process listens"), &consequence)
            .with_remedy_step("start the server program, or drain this server: `coreward drain NAME`");
    }
    let consequence = "the kernel selects the worker: another core than the selected one may serve a connection";
    let nginx_remedy = format!(
        "one socket per worker with SO_REUSEPORT (nginx: `listen {} reuseport`), or `steer = \"off\"`",
        service.address.vip_and_port
    );
    if is_steering_on && sockets.has_reuseport == Some(false) {
        return Finding::warning(
            format!("{service_description}: no SO_REUSEPORT (sockets: {socket_count})"),
            consequence,
        )
        .with_remedy_step(nginx_remedy);
    }
    if is_steering_on && socket_count < receive_queue_count {
        return Finding::warning(
            format!("{service_description}: sockets: {socket_count}, receive queues: {receive_queue_count}"),
            consequence,
        )
        .with_remedy_step(nginx_remedy);
    }
    Finding::ok(format!("{service_description}: sockets: {socket_count}"))
}

pub fn check_polling_threads(facts: &MachineFacts) -> Vec<Finding> {
    if !facts.settings.reports_cpu_time_as_load {
        return vec![];
    }
    if facts.polling_threads.is_empty() {
        return vec![Finding::ok("no pinned thread polls")];
    }
    let thread_names: Vec<String> = facts
        .polling_threads
        .iter()
        .map(|polling| format!("{} (thread {}) on CPU {}", polling.name, polling.thread_id, polling.cpu))
        .collect();
    let observation = format!("threads that never wait (full load, or polling): {}", thread_names.join(", "));
    let consequence = "the CPU of a server that polls (DPDK, AF_XDP) is busy all the time, whatever its load";
    vec![Finding::warning(observation, consequence).with_remedy_step(
        "if it polls: let it publish its load, and set `load = { source = \"published\", path = \"FILE\" }` in the \
         agent's file",
    )]
}

pub fn check_pinned_workers(facts: &MachineFacts) -> Vec<Finding> {
    if facts.settings.steering_mode != ConnectionSteeringMode::Affinity {
        return vec![];
    }
    let to_pinned_worker_finding = |(service, sockets): (&ServiceFacts, &Result<ServiceSocketFacts, String>)| {
        let sockets = sockets.as_ref().ok().filter(|sockets| sockets.socket_count > 0)?;
        let service_description = describe_service(service);
        if sockets.worker_cpu_affinities.is_empty() {
            return Some(Finding::unknown(format!("{service_description}: no process waits for its sockets")));
        }
        // With two CPUs, a core and its sibling are the whole machine. With one CPU there is no choice.
        let max_pinned_cpus = MAX_CPUS_OF_PINNED_WORKER.min(facts.online_cpu_count.saturating_sub(1)).max(1);
        let unpinned_count = sockets.worker_cpu_affinities.iter().filter(|cpus| cpus.len() > max_pinned_cpus).count();
        if unpinned_count == 0 {
            return Some(Finding::ok(format!(
                "{service_description}: {} workers, each on a CPU of its own",
                sockets.worker_cpu_affinities.len()
            )));
        }
        let consequence =
            "the agent steers by pinned workers (`steer = \"affinity\"`): it cannot assign queues to these";
        let observation = format!(
            "{service_description}: {unpinned_count} of {} workers may run anywhere",
            sockets.worker_cpu_affinities.len()
        );
        Some(
            Finding::warning(observation, consequence)
                .with_remedy_step("pin them (nginx: `worker_cpu_affinity auto;`), or `steer = \"order\"`"),
        )
    };
    services_with_sockets(facts).filter_map(to_pinned_worker_finding).collect()
}
