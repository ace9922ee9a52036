//! Unusable services of a configuration, for example with a value of a newer controller. The rest of the configuration
//! is used all the same: keys, other services, and the eligibility of these services' servers.

use std::collections::BTreeSet;

use crate::configuration::{Server, Service, StampedService, parse_each};
use crate::{WireError, v1};

/// An unusable service.
#[derive(Debug, Clone, PartialEq)]
pub struct RefusedService {
    /// Its name.
    pub name: String,
    /// Its index in the message, if it has one.
    pub index: u32,
    /// Reason.
    pub reason: WireError,
    /// Its usable servers.
    pub servers: Option<Vec<Server>>,
}

impl RefusedService {
    /// Returns the previous service with the present servers: drains take effect.
    pub fn kept(&self, before: &Service) -> Service {
        Service { servers: self.servers.clone().unwrap_or_else(|| before.servers.clone()), ..before.clone() }
    }

    /// Returns the message for the controller; `generation`: of the configuration.
    pub fn message(&self, generation: u64) -> v1::RefusedUpdate {
        v1::RefusedUpdate { service: self.name.clone(), generation, reason: self.reason.to_string(), table: false }
    }
}

impl v1::RefusedUpdate {
    /// Returns the reason in one line: a kernel's log of a program may be long.
    pub fn short_reason(&self) -> &str {
        self.reason.lines().next().unwrap_or_default()
    }
}

impl v1::LoadBalancerState {
    /// Returns the number of warnings that `coreward status` prints: faults of the machine, and refusals. Refusals with
    /// one reason count once.
    pub fn warning_count(&self) -> usize {
        let refusals: BTreeSet<_> =
            self.refused.iter().map(|refused| (refused.table, refused.generation, refused.short_reason())).collect();
        self.warnings.len() + refusals.len()
    }
}

/// Removes unusable services from a configuration.
pub fn take_refused(message: &mut v1::FleetConfiguration) -> Vec<RefusedService> {
    let mut refused = Vec::new();
    message.services.retain(|service| {
        let Err(reason) = Service::try_from(service) else { return true };
        let servers = parse_each("servers", &service.servers).ok();
        refused.push(RefusedService { name: service.name.clone(), index: service.index, reason, servers });
        false
    });
    refused
}

/// Removes unusable services from an agent's configuration.
pub fn take_refused_stamped(message: &mut v1::AgentConfiguration) -> Vec<RefusedService> {
    let mut refused = Vec::new();
    message.services.retain(|service| {
        let Err(reason) = StampedService::try_from(service) else { return true };
        refused.push(RefusedService { name: service.name.clone(), index: 0, reason, servers: None });
        false
    });
    refused
}
