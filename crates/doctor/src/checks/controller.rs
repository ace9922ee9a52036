//! Checks of the controller, and of the path to it.

use crate::facts::{Facts, StoreFacts};
use crate::finding::{Finding, Fix};

/// Checks the connection to the controller, on servers and load balancers.
pub fn controller_connection(facts: &Facts) -> Vec<Finding> {
    match &facts.reachable_controller {
        Some(Ok(address)) => vec![Finding::ok(format!("answers at {address}"))],
        Some(Err(reason)) => {
            let why = "the daemon starts, but has no services until a controller sends its configuration";
            vec![
                Finding::fault(reason.clone(), why)
                    .with_remediation("start the controller, correct `controller`, or open the firewall between them"),
            ]
        }
        None => vec![Finding::unknown("no controller is named: --config FILE or --controller ADDRESS:PORT")],
    }
}

/// Checks the listening address of a controller.
pub fn listen(facts: &Facts) -> Vec<Finding> {
    let Some(place) = &facts.controller_facts else { return vec![Finding::unknown("no file is named: --config FILE")] };
    match &place.listen_problem {
        _ if place.is_running => vec![Finding::ok(format!("a controller answers at {}", place.listen))],
        None => vec![Finding::ok(format!("{} can be bound", place.listen))],
        Some(problem) => {
            let remedy = format!(
                "ip address; ss -lntp 'sport = {}'  # an address of this machine, a free port",
                place.listen.port()
            );
            vec![
                Finding::fault(format!("{}: {problem}", place.listen), "the controller does not start")
                    .with_remediation(remedy),
            ]
        }
    }
}

pub fn store(facts: &Facts) -> Vec<Finding> {
    let Some(place) = &facts.controller_facts else { return vec![Finding::unknown("no file is named: --config FILE")] };
    let (path, problem, mode) = match &place.store {
        StoreFacts::File { path, problem, mode } => (path, problem, mode),
        StoreFacts::Etcd { endpoints, leader } => return vec![etcd(endpoints, leader)],
    };
    let store = path.display();
    if let Some(problem) = problem {
        let why = "the controller does not start, or loses server ids and keys: connections break";
        let directory = path.parent().map_or(path.display(), |parent| parent.display());
        let finding = Finding::fault(format!("{store}: {problem}"), why);
        return vec![
            finding
                .with_remediation(format!("install -d -m 700 {directory}"))
                .with_remediation(format!("df {directory}  # room for the store to be written again")),
        ];
    }
    match mode {
        Some(mode) if mode & 0o077 != 0 => {
            let why = "it contains the cookie keys: users who can read it can forge cookies";
            vec![
                Finding::fault(format!("{store}: mode {mode:o}, expected 600"), why)
                    .with_fix(Fix::RestrictToOwner(path.clone())),
            ]
        }
        Some(_) => vec![Finding::ok(format!("{store}: only its owner reads it"))],
        None => vec![Finding::ok(format!("{store}: can be created"))],
    }
}

fn etcd(endpoints: &[String], leader: &Result<String, String>) -> Finding {
    let endpoints = endpoints.join(",");
    match leader {
        Ok(leader) => Finding::ok(format!("etcd at {endpoints}: {leader}")),
        Err(problem) => {
            let why = "without etcd no controller can lead: load balancers keep their tables, and changes fail";
            Finding::fault(problem.clone(), why)
                .with_remediation(format!("etcdctl --endpoints {endpoints} endpoint health"))
        }
    }
}
