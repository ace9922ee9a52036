//! Decapsulation of packets from the load balancers that the file names (`decapsulate_from`).

use std::net::IpAddr;

use coreward_dataplane::decap::{self, Decapsulation};
use coreward_wire::StampedService;

use crate::config::Config;

/// Decapsulating XDP program at the device, if the configuration file lists source addresses.
#[derive(Debug)]
pub struct Decapsulator {
    program: Option<Decapsulation>,
    /// Names of the services whose packets are encapsulated.
    services: Vec<String>,
}

impl Decapsulator {
    /// Attaches the program if the configuration file lists source addresses; otherwise removes the program of an
    /// earlier process. Fails when the device has another XDP program.
    pub fn start(config: &Config, interface_index: u32) -> anyhow::Result<Self> {
        let Some(sources) = &config.decapsulate_from else {
            decap::remove(&config.pin_directory)?;
            return Ok(Self { program: None, services: Vec::new() });
        };
        let program = Decapsulation::attach(interface_index, &config.pin_directory)?;
        program.set_sources(sources)?;
        Ok(Self { program: Some(program), services: Vec::new() })
    }

    pub fn set_services(&mut self, services: &[StampedService]) -> anyhow::Result<()> {
        let encapsulating = || services.iter().filter(|service| service.mode.forwarding.encapsulates());
        self.services = encapsulating().map(|service| service.name.clone()).collect();
        let vips: Vec<IpAddr> = encapsulating().map(|service| service.address.socket.ip()).collect();
        self.program.as_ref().map_or(Ok(()), |program| program.set_vips(&vips))
    }

    /// Returns a warning about services whose packets are not decapsulated, for `coreward status`.
    pub fn warning(&self) -> Option<String> {
        (self.program.is_none() && !self.services.is_empty()).then(|| {
            format!(
                "packets of {} arrive encapsulated: expected `decapsulate_from` with the load balancers' addresses, or \
                 a device of the kernel that decapsulates",
                self.services.join(", ")
            )
        })
    }

    /// Returns the names and values of the program's counters; empty without a program.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let Some(counters) = self.program.as_ref().and_then(|program| program.counters().ok()) else {
            return Vec::new();
        };
        decap::COUNTER_NAMES.into_iter().map(str::to_owned).zip(counters).collect()
    }
}

/// Detaches the decapsulating program, if one is attached.
pub fn remove(config: &Config) -> anyhow::Result<()> {
    decap::remove(&config.pin_directory)
}
