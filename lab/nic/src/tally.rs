//! Counts of passed, failed and skipped checks.

use std::process::ExitCode;

use anyhow::Result;

/// Numbers of passed, failed and skipped checks, each of which is printed as it ends.
#[derive(Default)]
pub struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Tally {
    /// Counts a check, and prints its measured values or the reason of its failure.
    pub fn check(&mut self, name: &str, result: Result<String>) {
        match result {
            Ok(measured) => {
                self.passed += 1;
                println!("ok       {name}: {measured}");
            }
            Err(error) => {
                self.failed += 1;
                println!("FAILED   {name}: {error:#}");
            }
        }
    }

    /// Counts and prints a check that cannot be made on this machine.
    pub fn skip(&mut self, name: &str, reason: &str) {
        self.skipped += 1;
        println!("skipped  {name}: {reason}");
    }

    /// Prints the numbers of checks. Returns failure if a check has failed.
    pub fn finish(self) -> ExitCode {
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
