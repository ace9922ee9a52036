//! Handle of a key-value server that runs on a server of the testbed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::server::KeyValueWorkerCounters;
use super::worker::SharedWorkerCounters;
use crate::addresses::SERVICE_ADDRESS;
use crate::core_load_file::read_core_load_file;
use crate::fleet;
use crate::process::TestbedProcess;
use crate::topology::Testbed;

/// Running key-value server. Dropping this value kills the server.
#[derive(Debug)]
pub struct KeyValueServer {
    master_process: TestbedProcess,
    counter_file_path: PathBuf,
}

impl KeyValueServer {
    /// Returns the process id of the master, which is the server's only process with `--threads`.
    pub fn pid(&self) -> u32 {
        self.master_process.pid()
    }

    /// Returns the process ids of the running workers, in the order of their start. The list is empty with
    /// `--threads`.
    pub fn worker_pids(&self) -> Vec<u32> {
        let children_path = format!("/proc/{0}/task/{0}/children", self.pid());
        let children_pids = fs::read_to_string(children_path).unwrap_or_default();
        children_pids.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Returns the process id of the worker with this number. Fails when the worker is not running.
    pub fn worker_pid(&self, worker_number: u8) -> anyhow::Result<u32> {
        let process_name = format!("core{worker_number}");
        let has_name = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|command| command.trim_end() == process_name)
        };
        self.worker_pids().into_iter().find(has_name).with_context(|| format!("there is no worker {worker_number}"))
    }

    /// Reads the counters of each worker. Fails when the counter file cannot be read.
    pub fn read_counters(&self) -> anyhow::Result<Vec<KeyValueWorkerCounters>> {
        let counter_values = read_core_load_file(&self.counter_file_path)?;
        let (counter_chunks, _) = counter_values.as_chunks::<{ SharedWorkerCounters::COUNTERS_PER_WORKER }>();
        Ok(counter_chunks.iter().map(KeyValueWorkerCounters::from).collect())
    }
}

impl Testbed {
    /// Starts a key-value server on server `number`, which listens on UDP at [`SERVICE_ADDRESS`]. `options` are
    /// additional options of `coreward-lab testbed key-value-server`. Waits until all its sockets are bound. Fails when
    /// the server does not exist, or is not ready in time.
    pub fn start_key_value_server(&self, number: u16, options: &[&str]) -> anyhow::Result<KeyValueServer> {
        let counter_file_path = self.directory().join(format!("key-value-s{number}"));
        // A killed server may have left its counter file, which must not count as a sign of readiness.
        let _ = fs::remove_file(&counter_file_path);
        let mut command = Command::new(fleet::lab_binary_path()?);
        command.args(["testbed", "key-value-server", "--listen", &SERVICE_ADDRESS.to_string()]);
        command
            .arg("--counter-file")
            .arg(&counter_file_path)
            .arg("--busy-file")
            .arg(fleet::core_load_file_path(self, number));
        command.args(options);
        let mut master_process = self.spawn(self.server(number)?, command)?;
        master_process.wait_for_file(&format!("the key-value server of server {number}"), &counter_file_path)?;
        Ok(KeyValueServer { master_process, counter_file_path })
    }
}
