//! Health checks of the services' servers, and their messages to the controller.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use coreward_dataplane::health_check_nat::{self, NatEntry, NatPrograms};
use coreward_health::checker::{self, Checker, MAX_CONCURRENT_CHECKS};
use coreward_health::path::{NatPath, NatTable};
use coreward_model::ServerId;
use coreward_model::health::{HealthVerdict, ProbeAddress};
use coreward_wire::{CheckedServer, HealthMessage, Service, ServiceIndex};
use tokio::sync::watch;
use tokio::time::Instant;

const MESSAGE_INTERVAL: Duration = Duration::from_secs(2);

const _: () = assert!(MAX_CONCURRENT_CHECKS <= health_check_nat::MAX_CONNECTIONS);

pub type CheckTarget = (ServiceIndex, ServerId);

/// Health checks by this load balancer. The fields are dropped in order: connections end before their NAT entries.
pub struct HealthChecks {
    checker: Checker<CheckTarget>,
    reported_changes: watch::Receiver<u64>,
    /// Receiver of verdict changes for [`HealthChecks::servers_down_if_changed`], like the one for messages.
    mask_changes: watch::Receiver<u64>,
    /// Time of the last message in this stream, or `None` before the first.
    last_message_at: Option<Instant>,
    interface: String,
    /// NAT programs for checks at the VIP. Loaded for the first such check, and kept: a check may be in progress.
    nat_programs: Option<NatPrograms>,
    /// Reason why checks at the VIP are impossible; `None`: they are possible.
    nat_problem: Option<String>,
}

struct HealthCheckNat(Arc<health_check_nat::NatTable>);

fn nat_entry(path: &NatPath) -> NatEntry {
    let NatPath { server, vip, port, source_port: own_port } = *path;
    NatEntry { server, vip, port, own_port }
}

impl NatTable for HealthCheckNat {
    fn add(&self, path: &NatPath) -> anyhow::Result<()> {
        self.0.add(&nat_entry(path))
    }

    fn remove(&self, path: &NatPath) {
        self.0.remove(&nat_entry(path));
    }
}

impl HealthChecks {
    /// Starts the checker without any checks. `interface` leads to the servers. Fails when no thread can be created.
    pub fn start(interface: String) -> anyhow::Result<Self> {
        let checker = Checker::start()?;
        let reported_changes = checker.subscribe_to_changes();
        let mask_changes = checker.subscribe_to_changes();
        Ok(Self {
            checker,
            reported_changes,
            mask_changes,
            last_message_at: None,
            interface,
            nat_programs: None,
            nat_problem: None,
        })
    }

    /// Replaces all checks by those that these services require.
    pub fn configure<'a>(&mut self, services: impl Iterator<Item = &'a Service> + Clone) {
        let checks = services.clone().filter_map(|service| service.check.as_ref());
        if checks.clone().any(|check| check.probe_address == ProbeAddress::Vip) {
            self.attach_nat_programs();
        } else {
            self.nat_problem = None;
        }
        let wanted: Vec<_> = services.filter_map(|service| self.checker_service(service)).collect();
        self.checker.set_services(wanted);
    }

    fn attach_nat_programs(&mut self) {
        if self.nat_programs.is_some() {
            return;
        }
        match NatPrograms::attach(&self.interface) {
            Ok(paths) => (self.nat_programs, self.nat_problem) = (Some(paths), None),
            Err(error) => {
                let problem = format!("servers cannot be checked at the VIP, and are not: {error:#}");
                if self.nat_problem.as_ref() != Some(&problem) {
                    tracing::warn!(
                        event = "checks-off",
                        interface = self.interface,
                        error = format!("{error:#}"),
                        "the load balancer cannot attach the programs for health checks at the VIP: such checks are off"
                    );
                }
                self.nat_problem = Some(problem);
            }
        }
    }

    /// Returns the service with its check, or `None` if the check is not configured or impossible.
    fn checker_service(&self, service: &Service) -> Option<checker::CheckedService<CheckTarget>> {
        let check = service.check.clone()?;
        let nat_table = self
            .nat_programs
            .as_ref()
            .map(|held| Arc::new(HealthCheckNat(held.nat_table().clone())) as Arc<dyn NatTable>);
        if check.probe_address == ProbeAddress::Vip && nat_table.is_none() {
            return None;
        }
        let servers = service.servers.iter().filter(|server| !server.has_left);
        let servers = servers.map(|server| ((service.index, server.id), server.address)).collect();
        Some(checker::CheckedService { check, vip: service.address.socket, servers, nat_table })
    }

    pub fn begin_stream(&mut self) {
        self.last_message_at = None;
    }

    /// Returns the next message, which is due at once after a change and otherwise every two seconds.
    pub fn next_message(&mut self) -> Option<HealthMessage> {
        let changed = self.reported_changes.has_changed().unwrap_or(false);
        if !changed && self.last_message_at.is_some_and(|reported| reported.elapsed() < MESSAGE_INTERVAL) {
            return None;
        }
        self.reported_changes.mark_unchanged();
        self.last_message_at = Some(Instant::now());
        let servers: Vec<_> = self.results().collect();
        // The end of all checks is a change, too.
        (changed || !servers.is_empty()).then_some(HealthMessage { servers })
    }

    /// Returns the servers that are down according to these checks, if the set may have changed since the last call.
    pub fn servers_down_if_changed(&mut self) -> Option<BTreeSet<CheckTarget>> {
        if !self.mask_changes.has_changed().unwrap_or(false) {
            return None;
        }
        self.mask_changes.mark_unchanged();
        let down = self.checker.results().into_iter().filter(|(_, found)| found.verdict() == Some(HealthVerdict::Down));
        Some(down.map(|(target, _)| target).collect())
    }

    pub fn results(&self) -> impl Iterator<Item = (ServiceIndex, ServerId, CheckedServer)> {
        self.checker.results().into_iter().map(|((service, server), found)| {
            let checked = CheckedServer {
                verdict: found.verdict(),
                verdict_duration: found.since.elapsed(),
                error: found.last_error,
                latency: found.latency,
                checks: found.check_count,
                failures: found.failure_count,
            };
            (service, server, checked)
        })
    }

    pub fn problem(&self) -> Option<&str> {
        self.nat_problem.as_deref()
    }
}
