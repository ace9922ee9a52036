//! Reads the NIC's RSS settings and, with `manage_rss`, sets them.

use coreward_model::ServerId;
use coreward_model::rss::{IndirectionTable, RssConfig, RssInputTransform, RssKey};

use super::{RssDevice, RssError, RssSettings};
use crate::saved_settings::SettingsStore;

/// RSS settings that the fleet's configuration requires for this server's NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredRssSettings {
    pub rss_key: RssKey,
    /// Id of this server, which is the seed for its balanced indirection table.
    pub indirection_table_seed: ServerId,
}

pub struct NicRssConfigurator {
    rss_device: Box<dyn RssDevice>,
    /// Settings that the agent sets on the NIC, or `None` if it only reads the NIC's settings.
    desired_rss: Option<DesiredRssSettings>,
    known_rss: Option<RssConfig>,
    /// Input transform that the sampled packets show, if it differs from the transform that the driver reports.
    observed_transform: Option<RssInputTransform>,
    receive_queue_count: u16,
    settings_change_count: u64,
    rss_problem: Option<String>,
}

impl NicRssConfigurator {
    pub fn new(rss_device: Box<dyn RssDevice>) -> Self {
        let mut manager = Self {
            rss_device,
            desired_rss: None,
            known_rss: None,
            observed_transform: None,
            receive_queue_count: 0,
            settings_change_count: 0,
            rss_problem: None,
        };
        manager.read_settings();
        // The generation starts at 1, so that the first report informs the controller even if RSS is unknown.
        manager.settings_change_count = manager.settings_change_count.max(1);
        manager
    }

    /// Saves the NIC's original settings. Sets the desired RSS key and table now, and again whenever the NIC has
    /// different ones.
    pub fn start_managing_rss(&mut self, desired_rss: DesiredRssSettings, settings_store: &mut SettingsStore) {
        self.desired_rss = Some(desired_rss);
        self.apply_desired_rss(settings_store);
    }

    /// Reads the NIC's settings, and sets the desired settings again if the NIC has lost them. Returns whether the RSS
    /// key, the table or the number of receive queues has changed.
    pub fn sync_with_nic(&mut self, settings_store: &mut SettingsStore) -> bool {
        let previous_change_count = self.settings_change_count;
        self.read_settings();
        self.apply_desired_rss(settings_store);
        self.settings_change_count != previous_change_count
    }

    /// Records the input transform that the sampled packets show.
    pub fn set_observed_transform(&mut self, input_transform: RssInputTransform) {
        let source = self.rss_device.settings_source_name();
        tracing::warn!(
            event = "rss-input-differs",
            interface = self.rss_device.interface_name(),
            source,
            observed_transform = input_transform.name(),
            "the NIC transforms the input of the RSS hash in another way than its driver reports: the agent uses the \
             observed transform"
        );
        self.observed_transform = Some(input_transform);
        self.read_settings();
    }

    pub fn restore_original_settings(&mut self, settings_store: &mut SettingsStore) {
        self.desired_rss = None;
        let Some(original_settings) = settings_store.get().rss.clone() else { return };
        let source = self.rss_device.settings_source_name();
        match self.rss_device.write_settings(&original_settings) {
            Ok(()) => tracing::info!(
                event = "rss-restored",
                interface = self.rss_device.interface_name(),
                source,
                "the agent has restored the NIC's original RSS key and indirection table"
            ),
            // This may fail because the original table refers to queues that no longer exist.
            Err(error) => {
                tracing::warn!(
                    event = "rss-not-restored",
                    interface = self.rss_device.interface_name(),
                    source,
                    %error,
                    "the agent cannot restore the NIC's original RSS key and table: restore both with `ethtool -X`"
                );
            }
        }
        if let Err(error) = settings_store.update_and_save(|settings| settings.rss = None) {
            tracing::warn!(
                event = "settings-not-cleared",
                interface = self.rss_device.interface_name(),
                error = format!("{error:#}"),
                "the agent cannot delete the saved original RSS settings: it will restore them again when it next stops"
            );
        }
        self.read_settings();
    }

    fn read_settings(&mut self) {
        let receive_queue_count = self.rss_device.receive_queue_count();
        let known_rss = match self.rss_device.read_config() {
            Ok(rss) => {
                self.rss_problem = find_queue_range_problem(&rss.indirection_table, receive_queue_count);
                let input_transform = self.observed_transform.unwrap_or(rss.key.input_transform());
                Some(RssConfig { key: rss.key.with_input_transform(input_transform), ..rss })
            }
            Err(error) => {
                self.record_read_error(error);
                None
            }
        };
        if (&known_rss, receive_queue_count) != (&self.known_rss, self.receive_queue_count) {
            self.settings_change_count += 1;
            (self.known_rss, self.receive_queue_count) = (known_rss, receive_queue_count);
        }
    }

    fn record_read_error(&mut self, error: RssError) {
        let rss_problem = format!("RSS is not known: {error}");
        if self.rss_problem.as_ref() != Some(&rss_problem) {
            let source = self.rss_device.settings_source_name();
            tracing::warn!(
                event = "rss-unknown",
                interface = self.rss_device.interface_name(),
                source,
                %error,
                "the agent cannot predict which receive queue the NIC selects for a connection: policies use the mean \
                 load of the server's cores"
            );
            self.rss_problem = Some(rss_problem);
        }
    }

    fn apply_desired_rss(&mut self, settings_store: &mut SettingsStore) {
        let Some(desired_rss) = self.desired_rss.clone() else { return };
        if let Err(error) = self.try_apply_desired_rss(&desired_rss, settings_store) {
            let rss_problem = format!("RSS cannot be set: {error:#}");
            if self.rss_problem.as_ref() != Some(&rss_problem) {
                tracing::warn!(
                    event = "rss-not-set",
                    interface = self.rss_device.interface_name(),
                    error = format!("{error:#}"),
                    "the agent cannot set the NIC's RSS key and table (`manage_rss`) and retries every second"
                );
                self.rss_problem = Some(rss_problem);
            }
        }
    }

    fn try_apply_desired_rss(
        &mut self,
        desired_rss: &DesiredRssSettings,
        settings_store: &mut SettingsStore,
    ) -> anyhow::Result<()> {
        let entry_count = self.rss_device.table_entry_count()?;
        let table = IndirectionTable::draw_balanced_entries(
            desired_rss.indirection_table_seed.get().into(),
            entry_count,
            self.receive_queue_count,
        )?;
        let current_settings = self.rss_device.read_unchecked_settings();
        let desired_settings = RssSettings {
            key: Some(desired_rss.rss_key.key_bytes().to_vec()),
            indirection_table: table.queue_by_entry().iter().map(|queue| u32::from(*queue)).collect(),
            input_transform: current_settings.as_ref().map_or(0, |current| current.input_transform),
        };
        if current_settings.as_ref().is_ok_and(|current| matches_desired_settings(current, &desired_settings)) {
            return Ok(());
        }
        if let Ok(current) = current_settings
            && settings_store.get().rss.is_none()
        {
            settings_store.update_and_save(|settings| settings.rss = Some(current))?;
        }
        self.rss_device.write_settings(&desired_settings)?;
        tracing::info!(
            event = "rss-set",
            interface = self.rss_device.interface_name(),
            source = self.rss_device.settings_source_name(),
            entries = entry_count,
            receive_queues = self.receive_queue_count,
            "the agent has set the fleet's RSS key and a balanced indirection table"
        );
        self.read_settings();
        Ok(())
    }

    pub fn settings_source_name(&self) -> &'static str {
        self.rss_device.settings_source_name()
    }

    /// Returns the NIC's RSS key, input transform and indirection table, or `None` if they are unknown.
    pub fn known_rss(&self) -> Option<&RssConfig> {
        self.known_rss.as_ref()
    }

    /// Returns the number of receive queues, at least 1.
    pub fn receive_queue_count(&self) -> u16 {
        self.receive_queue_count.max(1)
    }

    /// Returns the number of changes of the NIC's RSS settings that the agent has noticed so far, at least 1.
    pub fn settings_change_count(&self) -> u64 {
        self.settings_change_count
    }

    /// Returns the reason why the RSS settings cannot be read or set, for `coreward status`, or `None` if they can.
    pub fn rss_problem(&self) -> Option<&str> {
        self.rss_problem.as_deref()
    }
}

/// Returns whether the NIC has the desired settings. Keys are compared only if the NIC has one, and the NIC's key may
/// have zeros after the desired key.
fn matches_desired_settings(current_settings: &RssSettings, desired_settings: &RssSettings) -> bool {
    let desired_key = desired_settings.key.as_deref().unwrap_or_default();
    current_settings.indirection_table == desired_settings.indirection_table
        && current_settings.key.as_ref().is_none_or(|current_key| {
            let common_length = current_key.len().min(desired_key.len());
            current_key[..common_length] == desired_key[..common_length]
                && current_key[common_length..].iter().all(|byte| *byte == 0)
        })
}

fn find_queue_range_problem(table: &IndirectionTable, receive_queue_count: u16) -> Option<String> {
    let highest_queue = table.queue_by_entry().iter().max().copied().unwrap_or(0);
    (highest_queue >= receive_queue_count).then(|| {
        format!("the RSS table names receive queue {highest_queue}, but there are {receive_queue_count} queues")
    })
}

#[cfg(test)]
mod tests {
    use coreward_testbed::{find_missing_testbed_rights, skip_if};

    use super::*;

    struct FakeNic {
        settings: RssSettings,
        receive_queue_count: u16,
        accepts_key: bool,
    }

    impl RssDevice for std::sync::Arc<std::sync::Mutex<FakeNic>> {
        fn settings_source_name(&self) -> &'static str {
            "test"
        }
        fn interface_name(&self) -> &str {
            "nic0"
        }
        fn receive_queue_count(&self) -> u16 {
            self.lock().unwrap().receive_queue_count
        }
        fn read_unchecked_settings(&self) -> Result<RssSettings, RssError> {
            Ok(self.lock().unwrap().settings.clone())
        }
        fn read_config(&self) -> Result<RssConfig, RssError> {
            self.lock().unwrap().settings.to_checked_config("nic0", &[9; 40])
        }
        fn table_entry_count(&self) -> Result<usize, RssError> {
            Ok(self.lock().unwrap().settings.indirection_table.len())
        }
        fn write_settings(&mut self, settings: &RssSettings) -> Result<(), RssError> {
            let mut nic = self.lock().unwrap();
            let key = if nic.accepts_key { settings.key.clone() } else { None };
            nic.settings = RssSettings { key, ..settings.clone() };
            Ok(())
        }
    }

    fn new_fake_nic(entry_count: u32, accepts_key: bool) -> std::sync::Arc<std::sync::Mutex<FakeNic>> {
        let settings = RssSettings {
            key: accepts_key.then(|| vec![1; 40]),
            indirection_table: (0..entry_count).map(|entry| entry % 4).collect(),
            input_transform: 0,
        };
        std::sync::Arc::new(std::sync::Mutex::new(FakeNic { settings, receive_queue_count: 4, accepts_key }))
    }

    fn desired_rss() -> DesiredRssSettings {
        DesiredRssSettings {
            rss_key: RssKey::microsoft_verification_key(),
            indirection_table_seed: 7.try_into().unwrap(),
        }
    }

    #[test]
    fn rss_with_unusable_table_length_is_unknown() {
        let manager = NicRssConfigurator::new(Box::new(new_fake_nic(100, true)));
        assert_eq!((manager.known_rss(), manager.settings_change_count()), (None, 1));
        assert_eq!(
            manager.rss_problem(),
            Some("RSS is not known: nic0: an indirection table of 100 entries: expected a power of two from 1 to 2048")
        );
    }

    #[test]
    fn rss_changes_by_other_programs_are_detected() {
        let device = new_fake_nic(128, false);
        let mut manager = NicRssConfigurator::new(Box::new(device.clone()));
        assert_eq!(manager.known_rss().unwrap().key.key_bytes(), [9; 40]);
        device.lock().unwrap().settings.indirection_table[0] = 3;
        manager.read_settings();
        assert_eq!(
            (manager.settings_change_count(), manager.known_rss().unwrap().indirection_table.queue_for_hash(0)),
            (2, 3)
        );
        device.lock().unwrap().receive_queue_count = 3;
        manager.read_settings();
        assert_eq!(
            (manager.settings_change_count(), manager.rss_problem()),
            (3, Some("the RSS table names receive queue 3, but there are 3 queues"))
        );
    }

    #[test]
    fn managed_rss_is_set_reapplied_and_finally_restored() {
        skip_if!(find_missing_testbed_rights());
        let pin_directory =
            std::path::PathBuf::from(format!("/sys/fs/bpf/coreward-test-{}-remembered", std::process::id()));
        for accepts_key in [true, false] {
            let device = new_fake_nic(64, accepts_key);
            let original_settings = device.lock().unwrap().settings.clone();
            let mut settings_store = SettingsStore::open(&pin_directory).unwrap();
            let mut manager = NicRssConfigurator::new(Box::new(device.clone()));
            manager.start_managing_rss(desired_rss(), &mut settings_store);
            let balanced_table = IndirectionTable::draw_balanced_entries(7, 64, 4).unwrap();
            assert_eq!(manager.known_rss().unwrap().indirection_table, balanced_table);
            assert_eq!(
                (
                    manager.known_rss().unwrap().key == RssKey::microsoft_verification_key(),
                    manager.settings_change_count()
                ),
                (accepts_key, 2)
            );
            // Another program sets another table. Later the number of queues changes.
            device.lock().unwrap().settings.indirection_table[0] ^= 1;
            assert!(manager.sync_with_nic(&mut settings_store));
            assert_eq!(manager.known_rss().unwrap().indirection_table, balanced_table);
            device.lock().unwrap().receive_queue_count = 2;
            assert!(manager.sync_with_nic(&mut settings_store));
            assert_eq!(manager.known_rss().unwrap().indirection_table.queue_by_entry().iter().max(), Some(&1));
            assert!(!manager.sync_with_nic(&mut settings_store));
            // The process is killed, but the next one still knows the original settings.
            drop((manager, settings_store));
            let mut settings_store = SettingsStore::open(&pin_directory).unwrap();
            let mut manager = NicRssConfigurator::new(Box::new(device.clone()));
            manager.start_managing_rss(desired_rss(), &mut settings_store);
            manager.restore_original_settings(&mut settings_store);
            assert_eq!(device.lock().unwrap().settings, original_settings);
            assert_eq!(settings_store.get().rss, None);
            settings_store.remove_pinned_map().unwrap();
        }
        std::fs::remove_dir(&pin_directory).unwrap();
    }
}
