//! Decapsulates packets from the load balancers that the configuration file lists (`decapsulate_from`).

use std::net::IpAddr;

use coreward_dataplane::decap::{self, Decapsulation};
use coreward_wire::AgentService;

use crate::config::Config;

/// XDP program that decapsulates packets, which is attached if the configuration file lists source addresses.
#[derive(Debug)]
pub struct Decapsulator {
    decapsulation_program: Option<Decapsulation>,
    /// Names of the services whose packets arrive encapsulated.
    encapsulating_services: Vec<String>,
}

impl Decapsulator {
    /// Attaches the program if the configuration file lists source addresses, or else removes the program of an earlier
    /// process. Fails when the device has another XDP program.
    pub fn start(config: &Config, interface_index: u32) -> anyhow::Result<Self> {
        let Some(sources) = &config.decapsulate_from else {
            decap::detach_and_unpin(&config.pin_directory)?;
            return Ok(Self { decapsulation_program: None, encapsulating_services: Vec::new() });
        };
        let decapsulation_program = Decapsulation::attach(interface_index, &config.pin_directory)?;
        decapsulation_program.set_sources(sources)?;
        Ok(Self { decapsulation_program: Some(decapsulation_program), encapsulating_services: Vec::new() })
    }

    pub fn set_services(&mut self, services: &[AgentService]) -> anyhow::Result<()> {
        let encapsulating_services = || services.iter().filter(|service| service.mode.forwarding.encapsulates());
        self.encapsulating_services = encapsulating_services().map(|service| service.name.clone()).collect();
        let vips: Vec<IpAddr> = encapsulating_services().map(|service| service.address.vip_and_port.ip()).collect();
        self.decapsulation_program.as_ref().map_or(Ok(()), |program| program.set_vips(&vips))
    }

    /// Returns a warning for `coreward status` if services' packets arrive encapsulated and nothing decapsulates them.
    pub fn missing_program_warning(&self) -> Option<String> {
        (self.decapsulation_program.is_none() && !self.encapsulating_services.is_empty()).then(|| {
            format!(
                "packets of {} arrive encapsulated: expected `decapsulate_from` with the load balancers' addresses, or \
                 a device of the kernel that decapsulates",
                self.encapsulating_services.join(", ")
            )
        })
    }

    /// Returns the names and values of the program's counters, or an empty list if no program is attached.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let Some(counters) = self.decapsulation_program.as_ref().and_then(|program| program.counters().ok()) else {
            return Vec::new();
        };
        decap::COUNTER_NAMES.into_iter().map(str::to_owned).zip(counters).collect()
    }
}

pub fn detach_program(config: &Config) -> anyhow::Result<()> {
    decap::detach_and_unpin(&config.pin_directory)
}
