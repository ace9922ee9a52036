//! Reading, merging and writing of the configuration and the records. A change takes effect completely or not at all.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use coreward_config::{Diagnostics, TomlSource};
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_model::bucket_history::BucketHistory;
use coreward_tls::verify::RevocationList;
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use crate::config::ControllerConfig;
use coreward_controller::rotation::KeyRotationStep;
use coreward_fleet::audit::{FleetChangeAuthor, FleetChangeDescription, describe_changes};
use coreward_fleet::clock::{RecordClock, round_down_to_seconds, wall_clock_time};
use coreward_fleet::config::{FleetConfig, list_changes};
use coreward_fleet::drains::{self, ServerDrainRequest};
use coreward_fleet::fleet::Fleet;
use coreward_fleet::key_ring::KeyRotationPhase;
use coreward_fleet::records::{DrainRecord, FleetDocument, FleetRecords};
use coreward_metrics::metric_declarations::MetricKind::{Counter, Gauge};
use coreward_metrics::metric_declarations::{Component, MetricFamily, declare_family};
use coreward_metrics::metrics;
use coreward_store::{FleetStore, FleetStoreError};

metrics! {
    STORE_WRITABLE: MetricFamily<0> = declare_family(
        Gauge, "coreward_store_writable", &[], &[Component::Controller],
        "1: the last write to the store succeeded; 0: changes fail",
    );
    STORE_WRITES_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_store_writes_total", &["result"], &[Component::Controller],
        "Writes to the store, `written` or `failed`",
    );
    RELOADS_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_reloads_total", &["result"], &[Component::Controller],
        "Reloads by SIGHUP, `in-force` or `rejected`",
    );
    FLEET_FILE_REJECTED: MetricFamily<0> = declare_family(
        Gauge, "coreward_fleet_file_rejected", &[], &[Component::Controller],
        "1: the fleet's file was wrong at its last reading; an older document is in force",
    );
}

/// Manager of the configuration and the records. It is the only writer of the store.
pub struct FleetStateManager {
    config_path: PathBuf,
    config: ControllerConfig,
    fleet_config: FleetConfig,
    records: FleetRecords,
    store: FleetStore,
    clock: RecordClock,
    had_stored_records: bool,
    revoked_certificates: RevocationList,
    state_counters: Arc<FleetStateCounters>,
}

#[derive(Debug)]
pub struct FleetStateCounters {
    /// Whether the last write to the store succeeded.
    pub is_store_writable: AtomicBool,
    pub write_count: AtomicU64,
    pub failed_write_count: AtomicU64,
    /// Number of successful reloads of the controller's and the fleet's files.
    pub reload_count: AtomicU64,
    pub failed_reload_count: AtomicU64,
    /// Whether the fleet's file was rejected when it was last read, so that the active configuration differs from it.
    pub is_fleet_file_rejected: AtomicBool,
}

impl Default for FleetStateCounters {
    fn default() -> Self {
        let [writes, failed_writes, reloads, failed_reloads] = Default::default();
        let (is_writable, is_file_rejected) = (AtomicBool::new(true), AtomicBool::new(false));
        Self {
            is_store_writable: is_writable,
            write_count: writes,
            failed_write_count: failed_writes,
            reload_count: reloads,
            failed_reload_count: failed_reloads,
            is_fleet_file_rejected: is_file_rejected,
        }
    }
}

impl FleetStateCounters {
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.is_store_writable.load(Ordering::Relaxed) {
            warnings.push(
                "the store cannot be written, and nothing can be changed: expected free space and write access (the \
                 controller's log has the error)"
                    .to_owned(),
            );
        }
        if self.is_fleet_file_rejected.load(Ordering::Relaxed) {
            warnings.push(
                "the fleet's file is wrong, and an older document is in force: `coreward check` names the mistakes"
                    .to_owned(),
            );
        }
        warnings
    }

    pub fn add_metrics(&self, snapshot: &mut MetricsSnapshot) {
        let read_count = |count: &AtomicU64| count.load(Ordering::Relaxed) as f64;
        let read_flag = |flag: &AtomicBool| f64::from(u8::from(flag.load(Ordering::Relaxed)));
        snapshot.add_value(&STORE_WRITABLE, [], read_flag(&self.is_store_writable));
        snapshot.add_value(&STORE_WRITES_TOTAL, ["written"], read_count(&self.write_count));
        snapshot.add_value(&STORE_WRITES_TOTAL, ["failed"], read_count(&self.failed_write_count));
        snapshot.add_value(&RELOADS_TOTAL, ["in-force"], read_count(&self.reload_count));
        snapshot.add_value(&RELOADS_TOTAL, ["rejected"], read_count(&self.failed_reload_count));
        snapshot.add_value(&FLEET_FILE_REJECTED, [], read_flag(&self.is_fleet_file_rejected));
    }
}

pub enum FleetRecordChange {
    ReloadFleetFile,
    ApplyDocument(Box<ApplyDocumentRequest>),
    /// Releases the ids of former servers and load balancers whose cookies have expired.
    RetireExpiredIds,
    RegisterLoadBalancer {
        name: String,
        /// Address at which other load balancers reach this one.
        address: Option<IpAddr>,
    },
    RecordLoadBalancerDisconnect {
        name: String,
    },
    DrainServer(ServerDrainRequest),
    UndrainServer(String),
    ForgetLoadBalancer(String),
    TakeKeyRotationStep(KeyRotationStep),
    StoreBucketHistories(Vec<(String, BucketHistory)>),
}

pub struct ApplyDocumentRequest {
    pub fleet: Result<FleetConfig, Diagnostics>,
    pub change_descriptions: Vec<String>,
    pub base_generation: u64,
    pub dry_run: bool,
}

/// Reason why a fleet document is not applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyDocumentError {
    /// The operator manages the fleet document in a file.
    #[error(
        "this controller's fleet is managed by {} (`fleet` in {}): expected changes there, then SIGHUP",
        file.display(),
        controller.display()
    )]
    ManagedByFile { file: PathBuf, controller: PathBuf },
    #[error(
        "generation {in_force} is in force, not {compared}, with which this was compared: expected a comparison with it"
    )]
    GenerationConflict { in_force: u64, compared: u64 },
    #[error(transparent)]
    InvalidDocument(#[from] Diagnostics),
}

/// Returns a random number generator for secrets, which the operating system seeds.
fn new_system_rng() -> UnwrapErr<SysRng> {
    UnwrapErr(SysRng)
}

impl FleetStateManager {
    /// Reads the fleet's file, opens the store, and merges both. `config` has the parsed contents of the file `path`.
    /// The revoked certificates of that file are written to `revocation_list`.
    pub fn open(
        path: &Path,
        config: ControllerConfig,
        revocation_list: RevocationList,
        open_store: impl FnOnce() -> anyhow::Result<FleetStore>,
    ) -> anyhow::Result<Self> {
        let fleet_config = config.fleet_file.as_deref().map(FleetConfig::load).transpose();
        // The file is checked before the store is created, so that an invalid fleet leaves no files behind.
        if let (Err(mistakes), false) = (&fleet_config, config.store.may_contain_records()) {
            return Err(mistakes.clone().into());
        }
        let store = open_store()?;
        let stored_records = store.load_records()?;
        let had_stored_records = stored_records.is_some();
        let clock = RecordClock::continue_from(stored_records.as_ref().and_then(|records| records.last_write_at));
        let (fleet, records, is_file_rejected) = merge_or_keep_stored_document(
            fleet_config,
            config.fleet_file.as_deref(),
            stored_records.as_ref(),
            clock.now(),
        )?;
        revocation_list.replace_fingerprints(config.revoked_certificates.iter().copied());
        let state_counters = Arc::new(FleetStateCounters::default());
        state_counters.is_fleet_file_rejected.store(is_file_rejected, Ordering::Relaxed);
        let mut manager = Self {
            config_path: path.to_owned(),
            config,
            fleet_config: fleet,
            records,
            store,
            clock,
            had_stored_records,
            revoked_certificates: revocation_list,
            state_counters,
        };
        manager.save_records_at_start(stored_records)?;
        Ok(manager)
    }

    /// Writes the records for the first time since the start. If the embedded store cannot be written, continues with
    /// the stored records. Fails if etcd cannot be written.
    fn save_records_at_start(&mut self, stored_records: Option<FleetRecords>) -> anyhow::Result<()> {
        match (self.save_records(&self.records.clone()), stored_records) {
            (Ok(()), _) => {}
            // If the disk is full, a controller continues from the records, but without changes.
            (Err(error), Some(last_records)) if !matches!(error, FleetStoreError::Etcd(_)) => {
                tracing::warn!(
                    event = "store-read-only",
                    %error,
                    "the controller cannot write to its store: it continues with the stored configuration, but \
                     rejects changes"
                );
                if last_records.document.text != self.records.document.text {
                    self.fleet_config = parse_stored_document(&last_records.document)?;
                }
                self.records = last_records;
            }
            (Err(error), _) => return Err(error.into()),
        }
        Ok(())
    }

    pub fn config_path(&self) -> &Path {
        &self.config_path
    }

    pub fn state_counters(&self) -> Arc<FleetStateCounters> {
        self.state_counters.clone()
    }

    fn save_records(&mut self, records: &FleetRecords) -> Result<(), FleetStoreError> {
        let save_result = self.store.save_records(records);
        let was_writable = self.state_counters.is_store_writable.swap(save_result.is_ok(), Ordering::Relaxed);
        match &save_result {
            Ok(()) => {
                self.state_counters.write_count.fetch_add(1, Ordering::Relaxed);
                if !was_writable {
                    tracing::info!(
                        event = "store-writable",
                        "the controller can write to its store again and accepts changes"
                    );
                }
            }
            Err(_) => drop(self.state_counters.failed_write_count.fetch_add(1, Ordering::Relaxed)),
        }
        save_result
    }

    /// Returns whether the store was used before, so that load balancers may have tables of an earlier process.
    pub fn had_stored_records(&self) -> bool {
        self.had_stored_records
    }

    pub fn record_clock(&self) -> RecordClock {
        self.clock
    }

    pub fn fleet(&self) -> Fleet {
        let rss_key = self.config.rss_key.as_ref().map(|key| key.expose().clone());
        Fleet::new(&self.fleet_config, &self.records).with_controller_settings(self.config.fleet_file.clone(), rss_key)
    }

    /// Returns the generation of the active fleet document.
    pub fn document_generation(&self) -> u64 {
        self.records.document.generation
    }

    /// Makes the change and returns the new configuration if it differs. After an error, nothing has changed except
    /// revoked certificates. A change that does not affect the configuration succeeds even if it cannot be written yet.
    pub fn apply_change(
        &mut self,
        change: FleetRecordChange,
        author: &FleetChangeAuthor,
    ) -> anyhow::Result<Option<Fleet>> {
        let now = self.clock.now();
        match change {
            FleetRecordChange::ReloadFleetFile => self.reload_files_and_count(author).map(Some),
            FleetRecordChange::ApplyDocument(request) => self.apply_document(*request, author),
            FleetRecordChange::RetireExpiredIds => self.remove_expired_records(),
            FleetRecordChange::RegisterLoadBalancer { name, address } => {
                self.change_records(|records| records.register_load_balancer(&name, address))
            }
            FleetRecordChange::RecordLoadBalancerDisconnect { name } => self.change_records(|records| {
                records.record_load_balancer_disconnect(&name, now);
                false
            }),
            FleetRecordChange::DrainServer(request) => {
                let fleet = self.fleet();
                request.check(&fleet, |service, id| fleet.is_server_eligible(service, id))?;
                self.apply_audited_change(author, ("drain", &request.server_name), |records| {
                    records.drain_server(&request, records.generation + 1, now)
                })
            }
            FleetRecordChange::UndrainServer(server) => {
                drains::find_server_id(&self.fleet(), &server)?;
                self.apply_audited_change(author, ("undrain", &server), |records| records.undrain_server(&server))
            }
            FleetRecordChange::ForgetLoadBalancer(name) => {
                let is_known = self.records.load_balancers.contains_key(&name);
                anyhow::ensure!(is_known, ForgetLoadBalancerError::UnknownLoadBalancer(name));
                self.apply_audited_change(author, ("forget", &name), |records| records.forget_load_balancer(&name))
            }
            FleetRecordChange::TakeKeyRotationStep(step) => self.take_rotation_step(step, author),
            FleetRecordChange::StoreBucketHistories(histories) => self.store_bucket_histories(histories),
        }
    }

    fn remove_expired_records(&mut self) -> anyhow::Result<Option<Fleet>> {
        let (now, max_connection_lifetime) = (self.clock.now(), self.fleet_config.max_connection_lifetime);
        self.change_records(|records| {
            // After a crash, the clock has lost at most the time between two writes.
            records.last_write_at = Some(round_down_to_seconds(now));
            records.remove_expired(max_connection_lifetime, now)
        })
    }

    fn take_rotation_step(
        &mut self,
        step: KeyRotationStep,
        author: &FleetChangeAuthor,
    ) -> anyhow::Result<Option<Fleet>> {
        let now = self.clock.now();
        self.apply_audited_change(author, ("rotate-keys", ""), |records| {
            let next_generation = records.generation + 1;
            match step {
                KeyRotationStep::Announce { is_forced } => {
                    records.key_ring.announce_next_key(is_forced, next_generation, &mut new_system_rng())
                }
                KeyRotationStep::Switch => records.key_ring.switch_to_next_key(now, next_generation),
            }
            true
        })
    }

    fn store_bucket_histories(&mut self, histories: Vec<(String, BucketHistory)>) -> anyhow::Result<Option<Fleet>> {
        self.change_records(|records| {
            for (name, history) in histories {
                if let Some(service) = records.services.get_mut(&name) {
                    service.bucket_history = history;
                }
            }
            false
        })
    }

    /// Makes a change of the records that concerns one object (`target`), and adds an audit entry if the records
    /// change.
    fn apply_audited_change(
        &mut self,
        author: &FleetChangeAuthor,
        (action, target): (&'static str, &str),
        change: impl FnOnce(&mut FleetRecords) -> bool,
    ) -> anyhow::Result<Option<Fleet>> {
        self.change_records(|records| {
            let previous_description = describe_action_target(records, action, target);
            let has_changed = change(records);
            if has_changed {
                let new_description = describe_action_target(records, action, target);
                let change_description = FleetChangeDescription {
                    action,
                    target: target.to_owned(),
                    state_before: previous_description,
                    state_after: new_description,
                };
                records.append_audit_entry(author, change_description, wall_clock_time());
            }
            has_changed
        })
    }

    /// Changes a copy of the records and writes it. `change` returns whether the configuration also changes.
    fn change_records(&mut self, change: impl FnOnce(&mut FleetRecords) -> bool) -> anyhow::Result<Option<Fleet>> {
        let mut records = self.records.clone();
        let is_configuration_changed = change(&mut records);
        records.generation += u64::from(is_configuration_changed);
        if records != self.records {
            records.last_write_at = Some(round_down_to_seconds(self.clock.now()));
            match self.save_records(&records) {
                Ok(()) => {}
                // Connections of load balancers are not part of the configuration, and are written with the next
                // change. Thus a load balancer that returns while the disk is full gets its tables.
                Err(error) if !is_configuration_changed && !matches!(error, FleetStoreError::Etcd(_)) => {
                    tracing::warn!(
                        event = "change-not-stored",
                        %error,
                        "the controller cannot store a change outside the configuration, such as a load balancer's \
                         connection: it applies the change, and stores it with the next one"
                    );
                }
                Err(error) => return Err(error).context("the change is not on record, and not in force"),
            }
            self.records = records;
        }
        Ok(is_configuration_changed.then(|| self.fleet()))
    }

    fn apply_document(
        &mut self,
        request: ApplyDocumentRequest,
        author: &FleetChangeAuthor,
    ) -> anyhow::Result<Option<Fleet>> {
        if let Some(file) = self.config.fleet_file.clone().filter(|_| !request.dry_run) {
            return Err(ApplyDocumentError::ManagedByFile { file, controller: self.config_path.clone() }.into());
        }
        let (in_force, compared) = (self.records.document.generation, request.base_generation);
        if compared != in_force {
            return Err(ApplyDocumentError::GenerationConflict { in_force, compared }.into());
        }
        let fleet = request.fleet.map_err(ApplyDocumentError::InvalidDocument)?;
        let mut records = self.records.clone();
        let now = self.clock.now();
        records.apply_document(&fleet, now, &mut new_system_rng()).map_err(ApplyDocumentError::InvalidDocument)?;
        records.last_write_at = Some(round_down_to_seconds(now));
        if request.dry_run {
            return Ok(None);
        }
        add_document_audit_entry(&mut records, &self.records, ("apply", author), &request.change_descriptions);
        self.save_records(&records).context("the fleet is not on record, and not in force")?;
        (self.fleet_config, self.records) = (fleet, records);
        Ok(Some(self.fleet()))
    }

    /// Reloads the files, and counts whether this succeeds.
    fn reload_files_and_count(&mut self, author: &FleetChangeAuthor) -> anyhow::Result<Fleet> {
        let reload_result = self.reload_config_and_fleet_files(author);
        let reload_counter = match reload_result {
            Ok(_) => &self.state_counters.reload_count,
            Err(_) => &self.state_counters.failed_reload_count,
        };
        reload_counter.fetch_add(1, Ordering::Relaxed);
        self.state_counters.is_fleet_file_rejected.store(reload_result.is_err(), Ordering::Relaxed);
        reload_result
    }

    fn reload_config_and_fleet_files(&mut self, author: &FleetChangeAuthor) -> anyhow::Result<Fleet> {
        let config = ControllerConfig::load(&self.config_path)?;
        // Revocations take effect even if the rest cannot, so that revoking a lost key needs no space on a disk.
        self.revoked_certificates.replace_fingerprints(config.revoked_certificates.iter().copied());
        let fleet = match &config.fleet_file {
            Some(file) => FleetConfig::load(file)?,
            None => self.fleet_config.clone(),
        };
        let mut records = self.records.clone();
        let now = self.clock.now();
        records.apply_document(&fleet, now, &mut new_system_rng())?;
        records.last_write_at = Some(round_down_to_seconds(now));
        if records.document.generation != self.records.document.generation {
            let previous_source = TomlSource::from_text("the fleet in force", &self.records.document.text);
            let change_descriptions: Vec<String> =
                list_changes(&previous_source, fleet.source()).iter().map(ToString::to_string).collect();
            add_document_audit_entry(&mut records, &self.records, ("reload", author), &change_descriptions);
        }
        self.save_records(&records)?;
        for key in self.config.config_keys_needing_restart(&config) {
            tracing::warn!(
                event = "restart-required",
                file = %self.config_path.display(),
                key,
                "the controller keeps the old value of a changed key: restart the controller to apply the key"
            );
        }
        (self.config, self.fleet_config, self.records) = (config, fleet, records);
        Ok(self.fleet())
    }
}

/// Merges the fleet's file with the records, and returns both. Without a file, the stored document is merged.
fn merge_fleet_file_with_records(
    file: Result<Option<FleetConfig>, Diagnostics>,
    stored_records: Option<&FleetRecords>,
    now: Duration,
) -> anyhow::Result<(FleetConfig, FleetRecords)> {
    let mut records = stored_records.cloned().unwrap_or_else(|| FleetRecords::generate(now, &mut new_system_rng()));
    let fleet = match file? {
        Some(fleet) => fleet,
        None => parse_stored_document(&records.document)
            .context("the fleet that was applied last cannot be read any more")?,
    };
    records.apply_document(&fleet, now, &mut new_system_rng())?;
    // Load balancers that do not return count as disconnected from this time.
    let load_balancer_names: Vec<String> = records.load_balancers.keys().cloned().collect();
    load_balancer_names.iter().for_each(|name| records.record_load_balancer_disconnect(name, now));
    records.last_write_at = Some(round_down_to_seconds(now));
    Ok((fleet, records))
}

/// Merges the fleet's file with the records like [`merge_fleet_file_with_records`]. If the file at `file_path` has a
/// mistake, the stored document stays in force. Returns the fleet, the records, and whether the file was rejected.
/// Fails if the file has a mistake and no document is stored.
fn merge_or_keep_stored_document(
    file: Result<Option<FleetConfig>, Diagnostics>,
    file_path: Option<&Path>,
    stored_records: Option<&FleetRecords>,
    now: Duration,
) -> anyhow::Result<(FleetConfig, FleetRecords, bool)> {
    let error = match merge_fleet_file_with_records(file, stored_records, now) {
        Ok((fleet, records)) => return Ok((fleet, records, false)),
        Err(error) => error,
    };
    // A mistake made in the file while a controller ran does not prevent the next start.
    let records_with_document = stored_records.filter(|records| !records.document.text.is_empty());
    let (Some(file_path), Some(last_records)) = (file_path, records_with_document) else { return Err(error) };
    tracing::warn!(
        event = "fleet-file-rejected",
        file = %file_path.display(),
        generation = last_records.document.generation,
        error = format!("{error:#}"),
        "the controller rejects the fleet's file: the last valid generation stays in force"
    );
    let (fleet, records) = merge_fleet_file_with_records(Ok(None), Some(last_records), now)?;
    Ok((fleet, records, true))
}

/// Adds an audit entry about a new fleet document to the records.
fn add_document_audit_entry(
    records: &mut FleetRecords,
    previous_records: &FleetRecords,
    (action, author): (&'static str, &FleetChangeAuthor),
    changes: &[String],
) {
    let (old_generation, new_generation) = (previous_records.document.generation, records.document.generation);
    if old_generation == new_generation {
        return;
    }
    let new_description = format!("generation {new_generation}: {}", describe_changes(changes));
    let change_description = FleetChangeDescription {
        action,
        target: String::new(),
        state_before: format!("generation {old_generation}"),
        state_after: new_description,
    };
    records.append_audit_entry(author, change_description, wall_clock_time());
}

/// Returns a description of the object that an action changes. The audit log contains the description before and after
/// the change.
fn describe_action_target(records: &FleetRecords, action: &str, target: &str) -> String {
    if action == "rotate-keys" {
        let next_key_suffix =
            if records.key_ring.phase == KeyRotationPhase::Steady { "" } else { ", the next one is announced" };
        return format!("key {} stamps{next_key_suffix}", records.key_ring.keys.current_key_index.get());
    }
    if action == "forget" {
        return match records.load_balancers.get(target).map(|record| record.owner_number) {
            None => "not known".to_owned(),
            Some(None) => "without a number".to_owned(),
            Some(Some(owner)) => format!("number {}", owner.get()),
        };
    }
    let mut servers = records.servers.values().filter(|server| server.is_in_document);
    match servers.find(|server| server.name == target).and_then(|server| server.drain.as_ref()) {
        None => "not drained".to_owned(),
        Some(DrainRecord { services: None, .. }) => "drained".to_owned(),
        Some(DrainRecord { services: Some(services), .. }) => {
            format!("drained in {}", services.iter().cloned().collect::<Vec<_>>().join(", "))
        }
    }
}

/// Reason why a load balancer cannot be forgotten.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgetLoadBalancerError {
    #[error("load balancer {0:?} does not exist")]
    UnknownLoadBalancer(String),
    #[error("load balancer {0:?} is connected: expected one whose daemon was stopped")]
    ConnectedLoadBalancer(String),
}

fn parse_stored_document(document: &FleetDocument) -> Result<FleetConfig, Diagnostics> {
    let document_name = format!("the applied fleet (generation {})", document.generation);
    FleetConfig::parse_stored(&TomlSource::from_text(&document_name, &document.text))
}

#[cfg(test)]
mod tests;
