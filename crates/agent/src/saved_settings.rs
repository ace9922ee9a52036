//! Stores the original values of changed settings, so that this agent or a later process can restore them.
//!
//! It uses JSON in a pinned BPF map, which outlives processes but not a reboot, like the NIC's settings.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType, libbpf_sys};
use serde::{Deserialize, Serialize};

use crate::rss::RssSettings;

/// Original settings of the machine, which the agent restores when it ends. Each is `None` if the agent has not changed
/// it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSettings {
    pub rss: Option<RssSettings>,
    pub tcp_timestamps: Option<String>,
}

/// Maximum size of the JSON text, in bytes. It suffices for the longest table (2048 queues of up to 5 digits) and key.
const SETTINGS_MAP_VALUE_BYTES: u32 = 16384;
const ORIGINAL_SETTINGS_MAP_NAME: &str = "coreward_orig";

#[derive(Debug)]
pub struct SettingsStore {
    settings_map: MapHandle,
    map_pin_path: PathBuf,
    saved_settings: SavedSettings,
}

impl SettingsStore {
    /// Opens the settings that an earlier process saved, or creates an empty map. Fails if `pin_directory` is not in a
    /// BPF file system.
    pub fn open(pin_directory: &Path) -> anyhow::Result<Self> {
        let map_pin_path = pin_directory.join("remembered");
        if map_pin_path.exists() {
            let settings_map =
                MapHandle::from_pinned_path(&map_pin_path).with_context(|| map_pin_path.display().to_string())?;
            let wrong_map_message =
                || format!("{}: expected a map with one entry, of this agent's settings", map_pin_path.display());
            let map_value = settings_map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?.with_context(wrong_map_message)?;
            let text = map_value.split(|byte| *byte == 0).next().unwrap_or_default();
            if text.is_empty() {
                return Ok(Self { settings_map, map_pin_path, saved_settings: SavedSettings::default() });
            }
            let current_settings = serde_json::from_slice(text).unwrap_or_else(|error| {
                tracing::warn!(
                    event = "settings-unknown",
                    pin = %map_pin_path.display(),
                    %error,
                    "the agent cannot decode the saved original settings of the NIC and the kernel: `coreward agent \
                     --detach` will not restore them"
                );
                SavedSettings::default()
            });
            return Ok(Self { settings_map, map_pin_path, saved_settings: current_settings });
        }
        fs::create_dir_all(pin_directory).with_context(|| pin_directory.display().to_string())?;
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
            ..Default::default()
        };
        let mut settings_map = MapHandle::create(
            MapType::Array,
            Some(ORIGINAL_SETTINGS_MAP_NAME),
            4,
            SETTINGS_MAP_VALUE_BYTES,
            1,
            &options,
        )
        .context("cannot create the BPF map of saved settings")?;
        settings_map.pin(&map_pin_path).with_context(|| {
            format!("cannot pin {}: expected a directory of a mounted bpffs", map_pin_path.display())
        })?;
        Ok(Self { settings_map, map_pin_path, saved_settings: SavedSettings::default() })
    }

    pub fn get(&self) -> &SavedSettings {
        &self.saved_settings
    }

    /// Changes the saved settings with `update`, and writes them to the map. Fails if the map cannot be written.
    pub fn update_and_save(&mut self, update: impl FnOnce(&mut SavedSettings)) -> anyhow::Result<()> {
        update(&mut self.saved_settings);
        let mut map_value = serde_json::to_vec(&self.saved_settings)?;
        anyhow::ensure!(
            map_value.len() < SETTINGS_MAP_VALUE_BYTES as usize,
            "the saved settings have {} bytes: expected fewer than {SETTINGS_MAP_VALUE_BYTES}",
            map_value.len()
        );
        map_value.resize(SETTINGS_MAP_VALUE_BYTES as usize, 0);
        let update_result = self.settings_map.update(&0u32.to_ne_bytes(), &map_value, MapFlags::ANY);
        update_result.with_context(|| format!("cannot save original settings in {}", self.map_pin_path.display()))
    }

    pub fn remove_pinned_map(self) -> anyhow::Result<()> {
        fs::remove_file(&self.map_pin_path).with_context(|| self.map_pin_path.display().to_string())
    }
}
