//! Manager of the NIC's RSS settings: reads them, and sets them with `manage_rss`.

use coreward_model::ServerId;
use coreward_model::rss::{IndirectionTable, InputTransform, RssConfig, RssKey};

use super::{RssDevice, RssError, RssSettings};
use crate::saved_settings::SettingsStore;

/// RSS settings that the fleet requires of this server's NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredRss {
    pub key: RssKey,
    /// Id of this server, which is the seed of the balanced indirection table.
    pub server_id: ServerId,
}

pub struct RssManager {
    device: Box<dyn RssDevice>,
    /// Settings to apply, or `None` if the NIC's settings are only read.
    desired: Option<DesiredRss>,
    known_rss: Option<RssConfig>,
    /// Input transform that the sampled packets show, if the driver reports another one.
    observed_input: Option<InputTransform>,
    receive_queues: u16,
    generation: u64,
    problem: Option<String>,
}

impl RssManager {
    pub fn new(device: Box<dyn RssDevice>) -> Self {
        let mut manager = Self {
            device,
            desired: None,
            known_rss: None,
            observed_input: None,
            receive_queues: 0,
            generation: 0,
            problem: None,
        };
        manager.refresh();
        // Generation 1 also reports that RSS is unknown.
        manager.generation = manager.generation.max(1);
        manager
    }

    /// Sets the RSS key and table, now and whenever the NIC has others. Saves the original settings.
    pub fn manage(&mut self, desired: DesiredRss, memory: &mut SettingsStore) {
        self.desired = Some(desired);
        self.apply(memory);
    }

    /// Reads the NIC's settings, and sets them again if the NIC lost them. Returns whether the RSS key, the table or
    /// the number of receive queues changed.
    pub fn sync(&mut self, memory: &mut SettingsStore) -> bool {
        let before = self.generation;
        self.refresh();
        self.apply(memory);
        self.generation != before
    }

    /// Sets the input transform that the sampled packets show.
    pub fn set_input(&mut self, input: InputTransform) {
        let source = self.device.source();
        tracing::warn!(
            event = "rss-input-differs",
            interface = self.device.interface(),
            source,
            input = input.name(),
            "the NIC hashes by another input transform than its driver reports: the agent uses the observed one"
        );
        self.observed_input = Some(input);
        self.refresh();
    }

    pub fn restore(&mut self, memory: &mut SettingsStore) {
        self.desired = None;
        let Some(original) = memory.get().rss.clone() else { return };
        let source = self.device.source();
        match self.device.write(&original) {
            Ok(()) => tracing::info!(
                event = "rss-restored",
                interface = self.device.interface(),
                source,
                "the agent has restored the NIC's original RSS key and table"
            ),
            // The original table may name queues that no longer exist.
            Err(error) => {
                tracing::warn!(
                    event = "rss-not-restored",
                    interface = self.device.interface(),
                    source,
                    %error,
                    "the agent cannot restore the NIC's original RSS key and table: set them with `ethtool -X`"
                );
            }
        }
        if let Err(error) = memory.change(|settings| settings.rss = None) {
            tracing::warn!(
                event = "settings-not-cleared",
                interface = self.device.interface(),
                error = format!("{error:#}"),
                "the agent cannot delete the saved RSS settings: its next stop restores them again"
            );
        }
        self.refresh();
    }

    fn refresh(&mut self) {
        let receive_queues = self.device.receive_queues();
        let known = match self.device.read() {
            Ok(rss) => {
                self.problem = queue_range_problem(&rss.indirection_table, receive_queues);
                let input = self.observed_input.unwrap_or(rss.key.input_transform());
                Some(RssConfig { key: rss.key.with_input(input), ..rss })
            }
            Err(error) => {
                self.record_error(error);
                None
            }
        };
        if (&known, receive_queues) != (&self.known_rss, self.receive_queues) {
            self.generation += 1;
            (self.known_rss, self.receive_queues) = (known, receive_queues);
        }
    }

    fn record_error(&mut self, error: RssError) {
        let text = format!("RSS is not known: {error}");
        if self.problem.as_ref() != Some(&text) {
            let source = self.device.source();
            tracing::warn!(
                event = "rss-unknown",
                interface = self.device.interface(),
                source,
                %error,
                "the agent cannot predict receive queues from the NIC's RSS settings"
            );
            self.problem = Some(text);
        }
    }

    fn apply(&mut self, memory: &mut SettingsStore) {
        let Some(desired) = self.desired.clone() else { return };
        if let Err(error) = self.try_apply(&desired, memory) {
            let text = format!("RSS cannot be set: {error:#}");
            if self.problem.as_ref() != Some(&text) {
                tracing::warn!(
                    event = "rss-not-set",
                    interface = self.device.interface(),
                    error = format!("{error:#}"),
                    "the agent cannot set the NIC's RSS key and table (`manage_rss`) and retries every second"
                );
                self.problem = Some(text);
            }
        }
    }

    fn try_apply(&mut self, desired: &DesiredRss, memory: &mut SettingsStore) -> anyhow::Result<()> {
        let entries = self.device.table_entries()?;
        let table = IndirectionTable::balanced(desired.server_id.get().into(), entries, self.receive_queues)?;
        let current = self.device.settings();
        let settings = RssSettings {
            key: Some(desired.key.bytes().to_vec()),
            indirection_table: table.queues().iter().map(|queue| u32::from(*queue)).collect(),
            input_transform: current.as_ref().map_or(0, |current| current.input_transform),
        };
        if current.as_ref().is_ok_and(|current| matches_desired(current, &settings)) {
            return Ok(());
        }
        if let Ok(current) = current
            && memory.get().rss.is_none()
        {
            memory.change(|settings| settings.rss = Some(current))?;
        }
        self.device.write(&settings)?;
        tracing::info!(
            event = "rss-set",
            interface = self.device.interface(),
            source = self.device.source(),
            entries,
            receive_queues = self.receive_queues,
            "the agent has set the fleet's RSS key and a balanced indirection table"
        );
        self.refresh();
        Ok(())
    }

    /// Returns the name of the source of the settings, for reports.
    pub fn source(&self) -> &'static str {
        self.device.source()
    }

    /// Returns the RSS key, input transform and indirection table, or `None` if they are unknown.
    pub fn known_rss(&self) -> Option<&RssConfig> {
        self.known_rss.as_ref()
    }

    /// Returns the number of receive queues, at least 1.
    pub fn receive_queues(&self) -> u16 {
        self.receive_queues.max(1)
    }

    /// Returns the number of changes of the settings so far, at least 1.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the problem with RSS, as text for `coreward status`.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }
}

/// Returns whether the NIC has the desired settings. The NIC's key may be longer, or missing if the NIC accepts none.
fn matches_desired(current: &RssSettings, desired: &RssSettings) -> bool {
    let key = desired.key.as_deref().unwrap_or_default();
    current.indirection_table == desired.indirection_table
        && current.key.as_ref().is_none_or(|current| {
            let common = current.len().min(key.len());
            current[..common] == key[..common] && current[common..].iter().all(|byte| *byte == 0)
        })
}

fn queue_range_problem(table: &IndirectionTable, receive_queues: u16) -> Option<String> {
    let highest = table.queues().iter().max().copied().unwrap_or(0);
    (highest >= receive_queues)
        .then(|| format!("the RSS table names receive queue {highest}, but there are {receive_queues} queues"))
}

#[cfg(test)]
mod tests {
    use coreward_testbed::{missing_testbed_rights, skip_if};

    use super::*;

    struct Nic {
        settings: RssSettings,
        queues: u16,
        accepts_key: bool,
    }

    impl RssDevice for std::sync::Arc<std::sync::Mutex<Nic>> {
        fn source(&self) -> &'static str {
            "test"
        }
        fn interface(&self) -> &str {
            "nic0"
        }
        fn receive_queues(&self) -> u16 {
            self.lock().unwrap().queues
        }
        fn settings(&self) -> Result<RssSettings, RssError> {
            Ok(self.lock().unwrap().settings.clone())
        }
        fn read(&self) -> Result<RssConfig, RssError> {
            self.lock().unwrap().settings.validate("nic0", &[9; 40])
        }
        fn table_entries(&self) -> Result<usize, RssError> {
            Ok(self.lock().unwrap().settings.indirection_table.len())
        }
        fn write(&mut self, settings: &RssSettings) -> Result<(), RssError> {
            let mut nic = self.lock().unwrap();
            let key = if nic.accepts_key { settings.key.clone() } else { None };
            nic.settings = RssSettings { key, ..settings.clone() };
            Ok(())
        }
    }

    fn nic(entries: u32, accepts_key: bool) -> std::sync::Arc<std::sync::Mutex<Nic>> {
        let settings = RssSettings {
            key: accepts_key.then(|| vec![1; 40]),
            indirection_table: (0..entries).map(|entry| entry % 4).collect(),
            input_transform: 0,
        };
        std::sync::Arc::new(std::sync::Mutex::new(Nic { settings, queues: 4, accepts_key }))
    }

    fn desired() -> DesiredRss {
        DesiredRss { key: RssKey::microsoft(), server_id: 7.try_into().unwrap() }
    }

    #[test]
    fn table_of_another_length_invalidates_rss() {
        let manager = RssManager::new(Box::new(nic(100, true)));
        assert_eq!((manager.known_rss(), manager.generation()), (None, 1));
        assert_eq!(
            manager.problem(),
            Some("RSS is not known: nic0: an indirection table of 100 entries: expected a power of two from 1 to 2048")
        );
    }

    #[test]
    fn changes_by_others_are_detected() {
        let device = nic(128, false);
        let mut manager = RssManager::new(Box::new(device.clone()));
        assert_eq!(manager.known_rss().unwrap().key.bytes(), [9; 40]);
        device.lock().unwrap().settings.indirection_table[0] = 3;
        manager.refresh();
        assert_eq!((manager.generation(), manager.known_rss().unwrap().indirection_table.queue(0)), (2, 3));
        device.lock().unwrap().queues = 3;
        manager.refresh();
        assert_eq!(
            (manager.generation(), manager.problem()),
            (3, Some("the RSS table names receive queue 3, but there are 3 queues"))
        );
    }

    #[test]
    fn managed_rss_is_set_kept_and_restored() {
        skip_if!(missing_testbed_rights());
        let pins = std::path::PathBuf::from(format!("/sys/fs/bpf/coreward-test-{}-remembered", std::process::id()));
        for accepts_key in [true, false] {
            let device = nic(64, accepts_key);
            let original = device.lock().unwrap().settings.clone();
            let mut memory = SettingsStore::open(&pins).unwrap();
            let mut manager = RssManager::new(Box::new(device.clone()));
            manager.manage(desired(), &mut memory);
            let table = IndirectionTable::balanced(7, 64, 4).unwrap();
            assert_eq!(manager.known_rss().unwrap().indirection_table, table);
            assert_eq!(
                (manager.known_rss().unwrap().key == RssKey::microsoft(), manager.generation()),
                (accepts_key, 2)
            );
            // Another program sets another table; then the number of queues changes.
            device.lock().unwrap().settings.indirection_table[0] ^= 1;
            assert!(manager.sync(&mut memory));
            assert_eq!(manager.known_rss().unwrap().indirection_table, table);
            device.lock().unwrap().queues = 2;
            assert!(manager.sync(&mut memory));
            assert_eq!(manager.known_rss().unwrap().indirection_table.queues().iter().max(), Some(&1));
            assert!(!manager.sync(&mut memory));
            // The process is killed; the next one still has the original.
            drop((manager, memory));
            let mut memory = SettingsStore::open(&pins).unwrap();
            let mut manager = RssManager::new(Box::new(device.clone()));
            manager.manage(desired(), &mut memory);
            manager.restore(&mut memory);
            assert_eq!(device.lock().unwrap().settings, original);
            assert_eq!(memory.get().rss, None);
            memory.remove().unwrap();
        }
        std::fs::remove_dir(&pins).unwrap();
    }
}
