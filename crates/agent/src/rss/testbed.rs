//! The testbed's emulated NIC: its registers are a pinned map (`struct emulated_rss` of bpf/include/intf.h).

use std::path::PathBuf;

use coreward_dataplane::ethtool::channels;
use coreward_intf as intf;
use coreward_model::rss::{IndirectionTable, InputTransform, Rss, RssKey};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{RssDevice, RssSettings, RssUnknown};

#[derive(Debug)]
pub struct TestbedRss {
    pin: PathBuf,
    interface: String,
    entries: usize,
}

impl TestbedRss {
    /// Returns the emulated NIC `interface` with the registers at `pin`. Tables to be set have `entries` entries.
    pub fn new(pin: PathBuf, interface: &str, entries: usize) -> Self {
        Self { pin, interface: interface.to_owned(), entries }
    }

    fn failed(&self, source: std::io::Error) -> RssUnknown {
        RssUnknown::Io { operation: format!("emulated NIC {}", self.pin.display()), source }
    }

    fn open(&self) -> Result<MapHandle, RssUnknown> {
        MapHandle::from_pinned_path(&self.pin).map_err(|error| self.failed(std::io::Error::other(error)))
    }

    fn read_registers(&self) -> Result<Box<intf::emulated_rss>, RssUnknown> {
        let bytes = self.open()?.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).ok().flatten();
        let registers = bytes.and_then(|bytes| intf::emulated_rss::read_from_bytes(&bytes).ok());
        registers.map(Box::new).ok_or_else(|| self.failed(std::io::Error::other("no struct emulated_rss")))
    }
}

impl RssDevice for TestbedRss {
    fn source(&self) -> &'static str {
        "testbed emulation"
    }

    fn interface(&self) -> &str {
        &self.interface
    }

    fn receive_queues(&self) -> u16 {
        channels(&self.interface).unwrap_or(1)
    }

    fn settings(&self) -> Result<RssSettings, RssUnknown> {
        let rss = self.read()?;
        let queues = rss.indirection_table.queues().iter().map(|queue| u32::from(*queue));
        // Drivers before 2025 do not report the input transform either.
        Ok(RssSettings { key: Some(rss.key.bytes().to_vec()), indirection_table: queues.collect(), input_transform: 0 })
    }

    fn read(&self) -> Result<Rss, RssUnknown> {
        let rss = Rss::from_emulated(&*self.read_registers()?);
        let rss = rss.map_err(|error| self.failed(std::io::Error::other(error)))?;
        Ok(Rss { key: rss.key.with_input(InputTransform::None), ..rss })
    }

    fn table_entries(&self) -> Result<usize, RssUnknown> {
        Ok(self.entries)
    }

    fn write(&mut self, settings: &RssSettings) -> Result<(), RssUnknown> {
        let registers = self.read_registers()?;
        let rss = match Rss::from_emulated(&registers) {
            Ok(current) => Rss {
                key: settings
                    .key
                    .as_deref()
                    .and_then(|key| RssKey::new(key).ok())
                    .map_or(current.key.clone(), |key| key.with_input(current.key.input())),
                indirection_table: IndirectionTable::new(&settings.indirection_table)
                    .unwrap_or(current.indirection_table),
            },
            // The registers were never written.
            Err(_) => settings.usable(&self.interface, &[])?,
        };
        let generation = registers.mapping.generation.wrapping_add(1);
        let registers = rss.emulated(generation).map_err(|error| self.failed(std::io::Error::other(error)))?;
        self.open()?
            .update(&0u32.to_ne_bytes(), registers.as_bytes(), MapFlags::ANY)
            .map_err(|error| self.failed(std::io::Error::other(error)))
    }
}
