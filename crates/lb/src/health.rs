//! Runs the health checks of the services' servers, and creates the messages about them to the controller.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use coreward_dataplane::health_check_nat::{self, HealthCheckNatPrograms, NatConnection};
use coreward_health::checker::{self, HealthChecker, MAX_CONCURRENT_HEALTH_CHECKS};
use coreward_health::nat_path::{HealthCheckNatPath, NatTable};
use coreward_model::ServerId;
use coreward_model::health::{HealthVerdict, ProbeAddress};
use coreward_wire::{HealthCheckResultsMessage, ServerCheckResult, Service, ServiceIndex};
use tokio::sync::watch;
use tokio::time::Instant;

const HEALTH_MESSAGE_INTERVAL: Duration = Duration::from_secs(2);

const _: () = assert!(MAX_CONCURRENT_HEALTH_CHECKS <= health_check_nat::MAX_NAT_CONNECTIONS);

pub type HealthCheckTarget = (ServiceIndex, ServerId);

/// Health checks by this load balancer. Fields are dropped in order, so that connections end before their NAT entries.
pub struct HealthChecks {
    checker: HealthChecker<HealthCheckTarget>,
    verdict_changes_for_messages: watch::Receiver<u64>,
    /// Receiver of verdict changes for [`HealthChecks::take_changed_down_servers`].
    verdict_changes_for_masks: watch::Receiver<u64>,
    /// Time of the last health message on the controller stream, or `None` if none was sent.
    last_message_at: Option<Instant>,
    interface_name: String,
    /// NAT programs for checks at the VIP. They are loaded for the first of these checks, and then kept because a check
    /// may be in progress.
    nat_programs: Option<HealthCheckNatPrograms>,
    /// Reason why checks at the VIP are impossible, or `None` if they are possible.
    nat_setup_problem: Option<String>,
}

struct HealthCheckNat(Arc<health_check_nat::NatTable>);

fn to_nat_connection(path: &HealthCheckNatPath) -> NatConnection {
    let HealthCheckNatPath { server_address: server, vip, server_port: port, source_port: own_port } = *path;
    NatConnection { server_address: server, vip, server_port: port, source_port: own_port }
}

impl NatTable for HealthCheckNat {
    fn add_entry(&self, path: &HealthCheckNatPath) -> anyhow::Result<()> {
        self.0.add_connection(&to_nat_connection(path))
    }

    fn remove_entry(&self, path: &HealthCheckNatPath) {
        self.0.remove_connection(&to_nat_connection(path));
    }
}

impl HealthChecks {
    /// Starts the checker without checks. Packets to servers leave by `interface`. Fails when no thread can be created.
    pub fn start(interface: String) -> anyhow::Result<Self> {
        let checker = HealthChecker::start()?;
        let verdict_changes_for_messages = checker.subscribe_to_verdict_changes();
        let verdict_changes_for_masks = checker.subscribe_to_verdict_changes();
        Ok(Self {
            checker,
            verdict_changes_for_messages,
            verdict_changes_for_masks,
            last_message_at: None,
            interface_name: interface,
            nat_programs: None,
            nat_setup_problem: None,
        })
    }

    /// Replaces all checks by those that the given services require.
    pub fn configure_checks<'a>(&mut self, services: impl Iterator<Item = &'a Service> + Clone) {
        let health_checks = services.clone().filter_map(|service| service.health_check.as_ref());
        if health_checks.clone().any(|check| check.probe_address == ProbeAddress::Vip) {
            self.attach_nat_programs();
        } else {
            self.nat_setup_problem = None;
        }
        let checked_services: Vec<_> = services.filter_map(|service| self.to_checked_service(service)).collect();
        self.checker.set_checked_services(checked_services);
    }

    fn attach_nat_programs(&mut self) {
        if self.nat_programs.is_some() {
            return;
        }
        match HealthCheckNatPrograms::attach(&self.interface_name) {
            Ok(nat_programs) => (self.nat_programs, self.nat_setup_problem) = (Some(nat_programs), None),
            Err(error) => {
                let problem = format!("servers cannot be checked at the VIP, and are not: {error:#}");
                if self.nat_setup_problem.as_ref() != Some(&problem) {
                    tracing::warn!(
                        event = "checks-off",
                        interface = self.interface_name,
                        error = format!("{error:#}"),
                        "the load balancer cannot attach the programs for health checks at VIPs: such checks are off"
                    );
                }
                self.nat_setup_problem = Some(problem);
            }
        }
    }

    /// Returns the service with its check, or `None` if no check is configured or the check is impossible.
    fn to_checked_service(&self, service: &Service) -> Option<checker::CheckedService<HealthCheckTarget>> {
        let health_check = service.health_check.clone()?;
        let nat_table = self
            .nat_programs
            .as_ref()
            .map(|nat_programs| Arc::new(HealthCheckNat(nat_programs.nat_table().clone())) as Arc<dyn NatTable>);
        if health_check.probe_address == ProbeAddress::Vip && nat_table.is_none() {
            return None;
        }
        let current_servers = service.servers.iter().filter(|server| !server.has_left);
        let servers_by_target = current_servers.map(|server| ((service.index, server.id), server.address)).collect();
        Some(checker::CheckedService {
            health_check,
            vip: service.address.vip_and_port,
            server_addresses_by_key: servers_by_target,
            nat_table,
        })
    }

    pub fn begin_controller_stream(&mut self) {
        self.last_message_at = None;
    }

    /// Returns the next message to the controller if it is due: immediately after a verdict change, and otherwise every
    /// two seconds.
    pub fn take_due_health_message(&mut self) -> Option<HealthCheckResultsMessage> {
        let has_changed = self.verdict_changes_for_messages.has_changed().unwrap_or(false);
        if !has_changed && self.last_message_at.is_some_and(|sent_at| sent_at.elapsed() < HEALTH_MESSAGE_INTERVAL) {
            return None;
        }
        self.verdict_changes_for_messages.mark_unchanged();
        self.last_message_at = Some(Instant::now());
        let checked_servers: Vec<_> = self.checked_server_results().collect();
        // A message without servers is sent once, when the last check has ended.
        (has_changed || !checked_servers.is_empty())
            .then_some(HealthCheckResultsMessage { check_results: checked_servers })
    }

    /// Returns the servers that this load balancer's checks found down, or `None` if no verdict has changed since the
    /// last call.
    pub fn take_changed_down_servers(&mut self) -> Option<BTreeSet<HealthCheckTarget>> {
        if !self.verdict_changes_for_masks.has_changed().unwrap_or(false) {
            return None;
        }
        self.verdict_changes_for_masks.mark_unchanged();
        let down_servers = self
            .checker
            .check_results()
            .into_iter()
            .filter(|(_, check_result)| check_result.verdict() == Some(HealthVerdict::Down));
        Some(down_servers.map(|(target, _)| target).collect())
    }

    pub fn checked_server_results(&self) -> impl Iterator<Item = (ServiceIndex, ServerId, ServerCheckResult)> {
        self.checker.check_results().into_iter().map(|((service, server), check_result)| {
            let server_result = ServerCheckResult {
                verdict: check_result.verdict(),
                verdict_age: check_result.verdict_since.elapsed(),
                error: check_result.last_error,
                latency: check_result.last_latency,
                completed_check_count: check_result.check_count,
                failed_check_count: check_result.failure_count,
            };
            (service, server, server_result)
        })
    }

    pub fn nat_setup_problem(&self) -> Option<&str> {
        self.nat_setup_problem.as_deref()
    }
}
