//! Thread that changes the configuration continuously, and records the controller's acknowledgements.
//!
//! The active document must be the newest *acknowledged* one, or a later one for which the controller gave no answer.
//! If a controller fails, its client cannot know whether it stored the document. Any other active document means that a
//! write was lost.

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;

use super::cli_probe::OperatorCli;
use super::document::DocumentGenerator;
use super::expected_drains::ExpectedServerDrains;
use crate::topology::Testbed;

/// Number of valid configuration changes per invalid change. The controller must reject the invalid ones.
const CHANGES_PER_INVALID_CHANGE: u64 = 10;
/// Number of configuration changes per request to rotate the cookie keys.
const CHANGES_PER_KEY_ROTATION: u64 = 50;
/// Number of configuration changes per `drain` or `undrain` command.
const CHANGES_PER_DRAIN: u64 = 4;
/// Number of configuration changes per check of the controller's state against the acknowledged changes.
const CHANGES_PER_STATE_CHECK: u64 = 10;
const WRITE_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Maximum time until the controller acknowledges the last configuration change.
const LAST_CHANGE_ACKNOWLEDGEMENT_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a `coreward` command (s). It is longer than the command's own timeout for a silent controller.
const COREWARD_COMMAND_TIMEOUT_S: &str = "8";

/// Counts of attempted configuration changes, by outcome.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ConfigWriteCounts {
    pub acknowledged_changes: u64,
    /// Number of changes that failed or that the controller did not answer.
    pub unanswered_changes: u64,
    /// Number of unanswered changes that the controller did apply, as a later comparison showed.
    pub unanswered_applied_changes: u64,
    /// Number of invalid documents sent, all of which the controller must reject.
    pub invalid_documents: u64,
    /// Number of requests to rotate the cookie keys too early, all of which the controller must reject.
    pub early_rotations: u64,
    /// Number of acknowledged `drain` and `undrain` commands.
    pub acknowledged_drains: u64,
    /// Number of `drain` and `undrain` commands that were rejected or not answered.
    pub unanswered_drains: u64,
    /// Number of queries for the active configuration.
    pub status_queries: u64,
    pub violations: Vec<String>,
}

/// Configuration that the controller should have applied, according to its acknowledgements.
#[derive(Debug, Default)]
pub struct ExpectedConfig {
    generation: u64,
    document_text: String,
    /// Documents that were sent but not acknowledged. The controller may have applied any of them.
    unanswered_documents: Vec<String>,
    expected_drains: ExpectedServerDrains,
}

/// Thread-safe writer that changes the fleet's configuration repeatedly. One thread makes the changes, and others may
/// read the counts.
#[derive(Debug)]
pub struct ConfigWriter<'a> {
    operator_cli: OperatorCli<'a>,
    document_path: PathBuf,
    write_counts: Mutex<ConfigWriteCounts>,
}

impl<'a> ConfigWriter<'a> {
    pub fn new(testbed: &'a Testbed, controller_count: u16) -> Self {
        let operator_cli = OperatorCli::new(testbed, controller_count, COREWARD_COMMAND_TIMEOUT_S);
        Self { operator_cli, document_path: testbed.directory().join("wanted.toml"), write_counts: Mutex::default() }
    }

    pub fn write_counts(&self) -> ConfigWriteCounts {
        self.write_counts.lock().expect("no writer panics").clone()
    }

    /// Makes `change_count` changes, at most one per `interval`, and waits until `stop_flag` is set. Then it activates
    /// all servers except one, which stays drained. The controller must already have applied the current document of
    /// `documents`. Fails when the controller does not answer at the beginning or after the end.
    pub fn apply_random_changes(
        &self,
        mut documents: DocumentGenerator,
        change_count: u64,
        interval: Duration,
        stop_flag: &AtomicBool,
    ) -> anyhow::Result<ExpectedConfig> {
        let mut expected_config = ExpectedConfig::default();
        (expected_config.generation, expected_config.document_text) = self.query_generation_and_document()?;
        let mut next_change_time = Instant::now();
        let mut attempted_changes = 0u64;
        while !stop_flag.load(Ordering::Relaxed) {
            if self.write_counts().acknowledged_changes >= change_count || Instant::now() < next_change_time {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            next_change_time = (next_change_time + interval).max(Instant::now() - 10 * interval);
            attempted_changes += 1;
            self.make_random_change(&mut expected_config, &mut documents, attempted_changes)?;
        }
        documents.restore_initial_document();
        let deadline = Instant::now() + LAST_CHANGE_ACKNOWLEDGEMENT_TIMEOUT;
        while !self.apply_document(&mut expected_config, &documents)? {
            ensure!(Instant::now() < deadline, "the last change is not acknowledged");
            std::thread::sleep(WRITE_RETRY_PAUSE);
        }
        // One server stays drained, to show that drains outlive the restart of all controllers.
        self.reduce_drained_server_count(&mut expected_config, 1)?;
        self.check_final_config(&mut expected_config)?;
        Ok(expected_config)
    }

    /// Makes a random change. Then it makes the drains, invalid changes, key rotations and state checks that are due
    /// after `attempted_changes` changes.
    fn make_random_change(
        &self,
        expected_config: &mut ExpectedConfig,
        documents: &mut DocumentGenerator,
        attempted_changes: u64,
    ) -> anyhow::Result<()> {
        documents.apply_random_change(&expected_config.expected_drains.possibly_drained_servers());
        if !self.apply_document(expected_config, documents)? {
            std::thread::sleep(WRITE_RETRY_PAUSE);
        }
        if attempted_changes.is_multiple_of(CHANGES_PER_DRAIN) {
            self.drain_or_undrain_server(expected_config, documents);
        }
        if attempted_changes.is_multiple_of(CHANGES_PER_INVALID_CHANGE) {
            self.try_invalid_document(expected_config, &documents.generate_invalid_document())?;
        }
        if attempted_changes.is_multiple_of(CHANGES_PER_KEY_ROTATION) {
            self.try_key_rotation();
        }
        if attempted_changes.is_multiple_of(CHANGES_PER_STATE_CHECK) {
            self.try_compare_with_controller(expected_config);
        }
        Ok(())
    }

    /// Compares the active configuration with the expected one. Fails when the controller does not answer.
    pub fn check_final_config(&self, expected_config: &mut ExpectedConfig) -> anyhow::Result<()> {
        ensure!(self.try_compare_with_controller(expected_config), "the controller does not return what is in force");
        Ok(())
    }

    /// Undrains servers until only `remaining_drain_count` servers are still drained by command. Fails when an undrain
    /// is not acknowledged in time.
    pub fn reduce_drained_server_count(
        &self,
        expected_config: &mut ExpectedConfig,
        remaining_drain_count: usize,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + LAST_CHANGE_ACKNOWLEDGEMENT_TIMEOUT;
        for server in expected_config.expected_drains.possibly_drained_servers().into_iter().skip(remaining_drain_count)
        {
            while !self.request_drain(expected_config, server, false) {
                ensure!(Instant::now() < deadline, "that s{server} is no longer drained is not acknowledged");
                std::thread::sleep(WRITE_RETRY_PAUSE);
            }
        }
        Ok(())
    }

    /// Applies the current document of `documents`. Returns whether the controller acknowledged it.
    fn apply_document(
        &self,
        expected_config: &mut ExpectedConfig,
        documents: &DocumentGenerator,
    ) -> anyhow::Result<bool> {
        let (text, present_servers) = (documents.document_text(), documents.current_server_numbers());
        fs::write(&self.document_path, &text)?;
        // The controller may have applied an earlier document that it did not answer.
        if !expected_config.unanswered_documents.is_empty() && !self.try_compare_with_controller(expected_config) {
            return Ok(false);
        }
        match self.apply_document_file() {
            Ok(generation) => {
                if generation <= expected_config.generation {
                    self.record_violation(format!(
                        "generation {generation} was acknowledged after {}",
                        expected_config.generation
                    ));
                }
                expected_config.expected_drains.record_sent_document(&present_servers, true);
                (expected_config.generation, expected_config.document_text) = (generation, text);
                expected_config.unanswered_documents.clear();
                self.update_write_counts(|writes| writes.acknowledged_changes += 1);
                Ok(true)
            }
            Err(_) => {
                expected_config.expected_drains.record_sent_document(&present_servers, false);
                expected_config.unanswered_documents.push(text);
                self.update_write_counts(|writes| writes.unanswered_changes += 1);
                Ok(false)
            }
        }
    }

    /// Drains another server if enough others stay active. Otherwise it undrains a server.
    fn drain_or_undrain_server(&self, expected_config: &mut ExpectedConfig, documents: &mut DocumentGenerator) {
        let drained_servers = expected_config.expected_drains.possibly_drained_servers();
        let next_drain = documents.next_server_to_drain(&drained_servers).map(|server| (server, true));
        if let Some((server, is_drain)) = next_drain.or_else(|| drained_servers.first().map(|server| (*server, false)))
        {
            self.request_drain(expected_config, server, is_drain);
        }
    }

    /// Sends a `drain` command for a server, or `undrain` if `is_drain` is false. Returns whether the controller
    /// acknowledged it.
    fn request_drain(&self, expected_config: &mut ExpectedConfig, server: u16, is_drain: bool) -> bool {
        let command = if is_drain { "drain" } else { "undrain" };
        let is_acknowledged = self.operator_cli.run_coreward(&[command, &format!("s{server}")]).is_ok();
        expected_config.expected_drains.record_drain_request(server, is_drain, is_acknowledged);
        self.update_write_counts(|writes| {
            *if is_acknowledged { &mut writes.acknowledged_drains } else { &mut writes.unanswered_drains } += 1
        });
        is_acknowledged
    }

    /// Tries to apply an invalid document, and records a violation if it is accepted.
    fn try_invalid_document(&self, expected_config: &mut ExpectedConfig, text: &str) -> anyhow::Result<()> {
        fs::write(&self.document_path, text)?;
        self.update_write_counts(|writes| writes.invalid_documents += 1);
        if let Ok(generation) = self.apply_document_file() {
            self.record_violation(format!("a document with a mistake is in force as generation {generation}:\n{text}"));
            (expected_config.generation, expected_config.document_text) = self.query_generation_and_document()?;
        }
        Ok(())
    }

    /// Requests a rotation of the cookie keys, and records a violation if it succeeds. The keys are minutes old and
    /// cookies are valid for a day, so the controller must reject it even if its clock is wrong.
    fn try_key_rotation(&self) {
        self.update_write_counts(|writes| writes.early_rotations += 1);
        if let Ok(answer) = self.operator_cli.run_coreward(&["keys", "rotate"]) {
            self.record_violation(format!("keys that are minutes old are rotated: {answer}"));
        }
    }

    /// Compares the active configuration with the expected one. Returns false if the controller does not answer.
    fn try_compare_with_controller(&self, expected_config: &mut ExpectedConfig) -> bool {
        let Ok((generation, text)) = self.query_generation_and_document() else { return false };
        let Ok(status) = self.query_status() else { return false };
        self.update_write_counts(|writes| writes.status_queries += 1);
        expected_config
            .expected_drains
            .find_status_differences(&status)
            .into_iter()
            .for_each(|difference| self.record_violation(difference));
        if text == expected_config.document_text && generation == expected_config.generation {
            return true;
        }
        if generation > expected_config.generation && expected_config.unanswered_documents.contains(&text) {
            self.update_write_counts(|writes| writes.unanswered_applied_changes += 1);
        } else {
            let to_first_line = |text: &str| text.lines().next().unwrap_or_default().to_owned();
            self.record_violation(format!(
                "a write is lost: generation {} ({:?}) was acknowledged, {generation} ({:?}) is in force",
                expected_config.generation,
                to_first_line(&expected_config.document_text),
                to_first_line(&text)
            ));
        }
        // Earlier attempts can no longer be applied, because each one requires the generation that it replaces.
        expected_config.unanswered_documents =
            discard_attempts_before_active_document(std::mem::take(&mut expected_config.unanswered_documents), &text);
        (expected_config.generation, expected_config.document_text) = (generation, text);
        true
    }

    /// Applies the document in the file at `document_path`. Returns the generation that the controller acknowledges as
    /// active.
    fn apply_document_file(&self) -> anyhow::Result<u64> {
        let document_path_text = self.document_path.display().to_string();
        let answer = self.operator_cli.run_coreward(&["apply", "--yes", &document_path_text])?;
        let generation = answer.lines().find_map(|line| line.strip_prefix("generation ")?.strip_suffix(" is in force"));
        match generation.map(str::parse) {
            Some(Ok(generation)) => Ok(generation),
            _ => bail!("not an answer: {answer}"),
        }
    }

    /// Returns the generation and the text of the active fleet document.
    fn query_generation_and_document(&self) -> anyhow::Result<(u64, String)> {
        let answer: serde_json::Value =
            serde_json::from_str(&self.operator_cli.run_coreward(&["fleet", "show", "--format", "json"])?)?;
        let generation = answer["generation"].as_u64().context("a document without a generation")?;
        Ok((generation, answer["text"].as_str().context("a document without a text")?.to_owned()))
    }

    fn query_status(&self) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::from_str(&self.operator_cli.run_coreward(&["status", "--format", "json"])?)?)
    }

    fn update_write_counts(&self, update: impl FnOnce(&mut ConfigWriteCounts)) {
        update(&mut self.write_counts.lock().expect("no writer panics"));
    }

    fn record_violation(&self, description: String) {
        self.update_write_counts(|writes| writes.violations.push(description));
    }
}

fn discard_attempts_before_active_document(attempts: Vec<String>, active_document_text: &str) -> Vec<String> {
    let position = attempts.iter().position(|text| text == active_document_text);
    attempts.into_iter().skip(position.map_or(0, |position| position + 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_before_the_active_document_are_discarded() {
        let attempts = ["a", "b", "c"].map(String::from).to_vec();
        assert_eq!(discard_attempts_before_active_document(attempts.clone(), "b"), ["c"]);
        assert_eq!(discard_attempts_before_active_document(attempts.clone(), "c"), [""; 0]);
        assert_eq!(discard_attempts_before_active_document(attempts.clone(), "x"), attempts);
    }
}
