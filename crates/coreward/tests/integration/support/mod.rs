//! Processes of the executable `coreward`, for tests.

use std::process::{Child, Command};

pub fn coreward_command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_coreward"))
}

/// Process of `coreward`, which is killed at the end of the test even if the test panics.
pub struct CorewardProcess(pub Child);

impl Drop for CorewardProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl CorewardProcess {
    pub fn send_signal(&self, signal_name: &str) {
        let kill_status = Command::new("kill").args(["-s", signal_name, &self.0.id().to_string()]).status().unwrap();
        assert!(kill_status.success(), "it has ended");
    }
}
