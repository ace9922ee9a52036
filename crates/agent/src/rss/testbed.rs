//! The testbed's emulated NIC: its registers are a pinned map (`struct emulated_rss` of bpf/include/intf.h).

use std::path::PathBuf;

use coreward_dataplane::ethtool::receive_queue_count;
use coreward_intf as intf;
use coreward_model::rss::{IndirectionTable, InputTransform, RssConfig, RssKey};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{RssDevice, RssError, RssSettings};

#[derive(Debug)]
pub struct TestbedRss {
    pin: PathBuf,
    interface: String,
    entry_count: usize,
}

impl TestbedRss {
    /// Returns the emulated NIC `interface`, with registers at `register_map_pin` and `table_entry_count` table
    /// entries.
    pub fn new(pin: PathBuf, interface: &str, entry_count: usize) -> Self {
        Self { pin, interface: interface.to_owned(), entry_count }
    }

    fn io_error(&self, source: std::io::Error) -> RssError {
        RssError::Io { operation: format!("emulated NIC {}", self.pin.display()), source }
    }

    fn open(&self) -> Result<MapHandle, RssError> {
        MapHandle::from_pinned_path(&self.pin).map_err(|error| self.io_error(std::io::Error::other(error)))
    }

    fn read_registers(&self) -> Result<Box<intf::emulated_rss>, RssError> {
        let bytes = self.open()?.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).ok().flatten();
        let registers = bytes.and_then(|bytes| intf::emulated_rss::read_from_bytes(&bytes).ok());
        registers.map(Box::new).ok_or_else(|| self.io_error(std::io::Error::other("no struct emulated_rss")))
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
        receive_queue_count(&self.interface).unwrap_or(1)
    }

    fn settings(&self) -> Result<RssSettings, RssError> {
        let rss = self.read()?;
        let queues = rss.indirection_table.queues().iter().map(|queue| u32::from(*queue));
        // Drivers before 2025 do not report the input transform either.
        Ok(RssSettings { key: Some(rss.key.bytes().to_vec()), indirection_table: queues.collect(), input_transform: 0 })
    }

    fn read(&self) -> Result<RssConfig, RssError> {
        let rss = RssConfig::from_emulated(&*self.read_registers()?);
        let rss = rss.map_err(|error| self.io_error(std::io::Error::other(error)))?;
        Ok(RssConfig { key: rss.key.with_input(InputTransform::None), ..rss })
    }

    fn table_entries(&self) -> Result<usize, RssError> {
        Ok(self.entry_count)
    }

    fn write(&mut self, settings: &RssSettings) -> Result<(), RssError> {
        let registers = self.read_registers()?;
        let rss = match RssConfig::from_emulated(&registers) {
            Ok(current) => RssConfig {
                key: settings
                    .key
                    .as_deref()
                    .and_then(|key| RssKey::new(key).ok())
                    .map_or(current.key.clone(), |key| key.with_input(current.key.input_transform())),
                indirection_table: IndirectionTable::new(&settings.indirection_table)
                    .unwrap_or(current.indirection_table),
            },
            // The registers were never written.
            Err(_) => settings.validate(&self.interface, &[])?,
        };
        let generation = registers.mapping.generation.wrapping_add(1);
        let registers = rss.emulated(generation).map_err(|error| self.io_error(std::io::Error::other(error)))?;
        self.open()?
            .update(&0u32.to_ne_bytes(), registers.as_bytes(), MapFlags::ANY)
            .map_err(|error| self.io_error(std::io::Error::other(error)))
    }
}
