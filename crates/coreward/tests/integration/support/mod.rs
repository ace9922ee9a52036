//! The program as a daemon.

use std::process::{Child, Command};

pub fn coreward() -> Command {
    Command::new(env!("CARGO_BIN_EXE_coreward"))
}

/// Process of `coreward`, which is killed at the end of the test, even after a panic.
pub struct Daemon(pub Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Daemon {
    pub fn signal(&self, name: &str) {
        let kill = Command::new("kill").args(["-s", name, &self.0.id().to_string()]).status().unwrap();
        assert!(kill.success(), "it has ended");
    }
}
