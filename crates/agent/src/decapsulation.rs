//! Decapsulates packets from the load balancers that the configuration file lists (`decapsulate_from`).

use std::net::IpAddr;

use coreward_dataplane::decap::{self, DecapProgram};
use coreward_wire::AgentService;

use crate::config::AgentConfig;

/// Manager of the XDP program that decapsulates packets. The program is attached if the configuration file lists source
/// addresses.
#[derive(Debug)]
pub struct Decapsulator {
    decapsulation_program: Option<DecapProgram>,
    /// Names of the services whose packets arrive encapsulated at this server.
    encapsulated_service_names: Vec<String>,
}

impl Decapsulator {
    /// Attaches the program if the configuration file lists source addresses. Otherwise, removes the program of an
    /// earlier process. Fails if the device has another XDP program.
    pub fn start(config: &AgentConfig, interface_index: u32) -> anyhow::Result<Self> {
        let Some(sources) = &config.decapsulate_from else {
            decap::detach_and_unpin(&config.pin_directory)?;
            return Ok(Self { decapsulation_program: None, encapsulated_service_names: Vec::new() });
        };
        let decapsulation_program = DecapProgram::attach(interface_index, &config.pin_directory)?;
        decapsulation_program.set_source_addresses(sources)?;
        Ok(Self { decapsulation_program: Some(decapsulation_program), encapsulated_service_names: Vec::new() })
    }

    pub fn set_services(&mut self, services: &[AgentService]) -> anyhow::Result<()> {
        let filter_encapsulated_services =
            || services.iter().filter(|service| service.settings.forwarding.encapsulates());
        self.encapsulated_service_names = filter_encapsulated_services().map(|service| service.name.clone()).collect();
        let vips: Vec<IpAddr> =
            filter_encapsulated_services().map(|service| service.address.vip_and_port.ip()).collect();
        self.decapsulation_program.as_ref().map_or(Ok(()), |program| program.set_vips(&vips))
    }

    /// Returns a warning for `coreward status` if packets of services arrive encapsulated and no program decapsulates
    /// them.
    pub fn missing_program_warning(&self) -> Option<String> {
        (self.decapsulation_program.is_none() && !self.encapsulated_service_names.is_empty()).then(|| {
            format!(
                "packets of {} arrive encapsulated: expected `decapsulate_from` with the load balancers' addresses, or \
                 a device of the kernel that decapsulates",
                self.encapsulated_service_names.join(", ")
            )
        })
    }

    /// Returns the names and values of the decapsulation program's counters, or an empty list without a program.
    pub fn named_counters(&self) -> Vec<(String, u64)> {
        let Some(counters) = self.decapsulation_program.as_ref().and_then(|program| program.counters().ok()) else {
            return Vec::new();
        };
        decap::COUNTER_NAMES.into_iter().map(str::to_owned).zip(counters).collect()
    }
}

pub fn detach_program(config: &AgentConfig) -> anyhow::Result<()> {
    decap::detach_and_unpin(&config.pin_directory)
}
