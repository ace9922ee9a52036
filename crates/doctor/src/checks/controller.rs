//! Checks of the controller, and of the connection to it.

use crate::facts::{ControllerStoreFacts, MachineFacts};
use crate::finding::{AutomaticFix, Finding};

/// Checks that a server or load balancer can connect to the controller.
pub fn check_controller_connection(facts: &MachineFacts) -> Vec<Finding> {
    match &facts.answering_controller {
        Some(Ok(address)) => vec![Finding::ok(format!("answers at {address}"))],
        Some(Err(reason)) => {
            let consequence = "the daemon starts, but has no services until a controller sends its configuration";
            vec![
                Finding::fault(reason.clone(), consequence)
                    .with_remedy_step("start the controller, correct `controller`, or open the firewall between them"),
            ]
        }
        None => vec![Finding::unknown("no controller is named: --config FILE or --controller ADDRESS:PORT")],
    }
}

/// Checks that the controller can listen at its configured address.
pub fn check_listen_address(facts: &MachineFacts) -> Vec<Finding> {
    let Some(controller) = &facts.controller_facts else {
        return vec![Finding::unknown("no file is named: --config FILE")];
    };
    match &controller.bind_problem {
        _ if controller.is_running => {
            vec![Finding::ok(format!("a controller answers at {}", controller.listen_address))]
        }
        None => vec![Finding::ok(format!("{} can be bound", controller.listen_address))],
        Some(problem) => {
            let remedy = format!(
                "ip address; ss -lntp 'sport = {}'  # an address of this machine, a free port",
                controller.listen_address.port()
            );
            vec![
                Finding::fault(format!("{}: {problem}", controller.listen_address), "the controller does not start")
                    .with_remedy_step(remedy),
            ]
        }
    }
}

pub fn check_store(facts: &MachineFacts) -> Vec<Finding> {
    let Some(controller) = &facts.controller_facts else {
        return vec![Finding::unknown("no file is named: --config FILE")];
    };
    let (path, problem, mode) = match &controller.store {
        ControllerStoreFacts::Embedded { path, problem, permission_bits: mode } => (path, problem, mode),
        ControllerStoreFacts::Etcd { endpoints, leader } => return vec![check_etcd(endpoints, leader)],
    };
    let store_path = path.display();
    if let Some(problem) = problem {
        let consequence = "the controller does not start, or loses server ids and keys: connections break";
        let directory = path.parent().map_or(path.display(), |parent| parent.display());
        let finding = Finding::fault(format!("{store_path}: {problem}"), consequence);
        return vec![
            finding
                .with_remedy_step(format!("install -d -m 700 {directory}"))
                .with_remedy_step(format!("df {directory}  # room for the store to be written again")),
        ];
    }
    match mode {
        Some(mode) if mode & 0o077 != 0 => {
            let consequence = "it contains the cookie keys: users who can read it can forge cookies";
            vec![
                Finding::fault(format!("{store_path}: mode {mode:o}, expected 600"), consequence)
                    .with_automatic_fix(AutomaticFix::RestrictToOwner(path.clone())),
            ]
        }
        Some(_) => vec![Finding::ok(format!("{store_path}: only its owner reads it"))],
        None => vec![Finding::ok(format!("{store_path}: can be created"))],
    }
}

fn check_etcd(endpoints: &[String], leader: &Result<String, String>) -> Finding {
    let endpoint_list = endpoints.join(",");
    match leader {
        Ok(leader) => Finding::ok(format!("etcd at {endpoint_list}: {leader}")),
        Err(problem) => {
            let consequence = "without etcd no controller can lead: load balancers keep their tables, and changes fail";
            Finding::fault(problem.clone(), consequence)
                .with_remedy_step(format!("etcdctl --endpoints {endpoint_list} endpoint health"))
        }
    }
}
