//! Atomic replacement of files.

use std::io::Write as _;
use std::path::Path;

use anyhow::Context;

/// Replaces the file `name` in `directory` by `content`, which is written under a temporary name and then renamed.
/// Fails with the file's path when it cannot be written.
pub fn write_atomically(directory: &Path, name: &str, content: &str) -> anyhow::Result<()> {
    let path = directory.join(name);
    let result = (|| -> std::io::Result<()> {
        let mut file = tempfile::Builder::new().prefix(".figure-").tempfile_in(directory)?;
        file.write_all(content.as_bytes())?;
        make_world_readable(file.as_file())?;
        file.persist(&path)?;
        Ok(())
    })();
    result.with_context(|| format!("cannot write {}", path.display()))
}

/// Makes the file readable for all users, because only the owner can read a newly created temporary file.
fn make_world_readable(file: &std::fs::File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_replaced_atomically() {
        let directory = tempfile::tempdir().unwrap();
        write_atomically(directory.path(), "a.csv", "first").unwrap();
        write_atomically(directory.path(), "a.csv", "second").unwrap();
        assert_eq!(std::fs::read_to_string(directory.path().join("a.csv")).unwrap(), "second");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        let error = write_atomically(&directory.path().join("absent"), "a.csv", "").unwrap_err();
        assert!(error.to_string().ends_with("absent/a.csv"), "{error}");
    }
}
