//! The testbed's emulated NIC, whose registers are a pinned map (`struct emulated_rss` in bpf/include/intf.h).

use std::path::PathBuf;

use coreward_dataplane::ethtool::receive_queue_count;
use coreward_intf as intf;
use coreward_model::rss::{IndirectionTable, RssConfig, RssInputTransform, RssKey};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{RssDevice, RssError, RssSettings};

#[derive(Debug)]
pub struct TestbedRssDevice {
    register_map_pin_path: PathBuf,
    interface: String,
    table_entry_count: usize,
}

impl TestbedRssDevice {
    /// Returns the emulated NIC `interface`. Its registers are in the map pinned at `register_map_pin_path`, and its
    /// indirection table has `table_entry_count` entries.
    pub fn new(register_map_pin_path: PathBuf, interface: &str, table_entry_count: usize) -> Self {
        Self { register_map_pin_path, interface: interface.to_owned(), table_entry_count }
    }

    fn io_error(&self, source: std::io::Error) -> RssError {
        RssError::Io { operation: format!("emulated NIC {}", self.register_map_pin_path.display()), source }
    }

    fn open_register_map(&self) -> Result<MapHandle, RssError> {
        MapHandle::from_pinned_path(&self.register_map_pin_path)
            .map_err(|error| self.io_error(std::io::Error::other(error)))
    }

    fn read_registers(&self) -> Result<Box<intf::emulated_rss>, RssError> {
        let register_bytes = self.open_register_map()?.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).ok().flatten();
        let registers = register_bytes.and_then(|bytes| intf::emulated_rss::read_from_bytes(&bytes).ok());
        registers.map(Box::new).ok_or_else(|| self.io_error(std::io::Error::other("no struct emulated_rss")))
    }
}

impl RssDevice for TestbedRssDevice {
    fn settings_source_name(&self) -> &'static str {
        "testbed emulation"
    }

    fn interface_name(&self) -> &str {
        &self.interface
    }

    fn receive_queue_count(&self) -> u16 {
        receive_queue_count(&self.interface).unwrap_or(1)
    }

    fn read_unchecked_settings(&self) -> Result<RssSettings, RssError> {
        let rss_config = self.read_config()?;
        let table_queues = rss_config.indirection_table.queue_by_entry().iter().map(|queue| u32::from(*queue));
        // The transform is left out, because the drivers of real NICs did not report it before 2025 either.
        Ok(RssSettings {
            key: Some(rss_config.key.key_bytes().to_vec()),
            indirection_table: table_queues.collect(),
            input_transform: 0,
        })
    }

    fn read_config(&self) -> Result<RssConfig, RssError> {
        let rss_config = RssConfig::from_emulated_registers(&*self.read_registers()?);
        let rss_config = rss_config.map_err(|error| self.io_error(std::io::Error::other(error)))?;
        Ok(RssConfig { key: rss_config.key.with_input_transform(RssInputTransform::None), ..rss_config })
    }

    fn table_entry_count(&self) -> Result<usize, RssError> {
        Ok(self.table_entry_count)
    }

    fn write_settings(&mut self, settings: &RssSettings) -> Result<(), RssError> {
        let old_registers = self.read_registers()?;
        let rss_config = match RssConfig::from_emulated_registers(&old_registers) {
            Ok(current) => RssConfig {
                key: settings
                    .key
                    .as_deref()
                    .and_then(|key| RssKey::new(key).ok())
                    .map_or(current.key.clone(), |key| key.with_input_transform(current.key.input_transform())),
                indirection_table: IndirectionTable::new(&settings.indirection_table)
                    .unwrap_or(current.indirection_table),
            },
            // Reading fails if the registers were never written.
            Err(_) => settings.to_checked_config(&self.interface, &[])?,
        };
        let generation = old_registers.mapping.generation.wrapping_add(1);
        let new_registers = rss_config
            .to_emulated_registers(generation)
            .map_err(|error| self.io_error(std::io::Error::other(error)))?;
        self.open_register_map()?
            .update(&0u32.to_ne_bytes(), new_registers.as_bytes(), MapFlags::ANY)
            .map_err(|error| self.io_error(std::io::Error::other(error)))
    }
}
