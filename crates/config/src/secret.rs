//! Secrets, which are read from files that only their owner can read, and are never printed.

use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use toml::Spanned;
use toml::de::DeValue;

use crate::{FromToml, TomlReader};

/// Secret that is read from a file of its own. A key whose name ends in `_file` contains the file's path.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret<T>(T);

/// Type of a secret that can be parsed from text. Parse errors are not shown, because they may quote the secret.
pub trait SecretText: FromStr {
    /// Description of the expected text, for error messages.
    const VALID_TEXT_DESCRIPTION: &'static str;
}

impl<T> Secret<T> {
    /// Wraps a secret that does not come from a file.
    pub fn new(secret: T) -> Self {
        Self(secret)
    }

    /// Returns the secret value. It must not appear in logs or in answers to clients.
    pub fn expose(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Maximum size of a secret file, in bytes.
const MAX_SECRET_FILE_BYTES: u64 = 65_536;

/// Whether this process rejects secret files that belong to other users.
static REJECTS_FOREIGN_SECRET_FILES: AtomicBool = AtomicBool::new(false);

/// Makes this process reject secret files that belong neither to its own user nor to root, because their owners could
/// read and change them. Only daemons call this. Commands run by root must read the files of daemons that run as other
/// users.
pub fn enable_secret_owner_check() {
    REJECTS_FOREIGN_SECRET_FILES.store(true, Ordering::Relaxed);
}

/// Returns the trimmed text of a secret file. Fails if others can read it, or if its owner is rejected
/// ([`enable_secret_owner_check`]).
pub fn read_secret(path: &Path) -> Result<String, String> {
    read_secret_checking_owner(path, REJECTS_FOREIGN_SECRET_FILES.load(Ordering::Relaxed))
}

/// Returns the trimmed text of a secret file. If the flag is set, rejects files that belong to other users.
pub(crate) fn read_secret_checking_owner(path: &Path, reject_foreign_owner: bool) -> Result<String, String> {
    let displayed_path = path.display();
    let unreadable_message =
        |reason: std::io::Error| format!("{displayed_path}: {reason}: expected a readable file with the secret");
    let file = std::fs::File::open(path).map_err(unreadable_message)?;
    // The metadata is that of the open file, so that a concurrent rename has no effect.
    let metadata = file.metadata().map_err(unreadable_message)?;
    if metadata.is_dir() {
        return Err(format!("{displayed_path} is a directory: expected a readable file with the secret"));
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "others can read or write {displayed_path} (mode {mode:04o}): expected `chmod 600 {displayed_path}`"
        ));
    }
    let (owner_uid, process_uid) = (metadata.uid(), nix::unistd::geteuid().as_raw());
    if reject_foreign_owner && owner_uid != process_uid && owner_uid != 0 {
        return Err(format!(
            "{displayed_path} belongs to user {owner_uid}: expected user {process_uid}, as which this runs, or root \
             (chown)"
        ));
    }
    let mut text = String::new();
    file.take(MAX_SECRET_FILE_BYTES).read_to_string(&mut text).map_err(unreadable_message)?;
    Ok(text.trim().to_owned())
}

impl<T: SecretText> FromToml for Secret<T> {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        let DeValue::String(name) = value.get_ref() else { return reader.report_wrong_type::<Self>(value) };
        let path = reader.resolve_path(Path::new(name.as_ref()));
        let secret = read_secret(&path).and_then(|text| {
            let build_invalid_message =
                |_| format!("{} holds something else: expected {}", path.display(), T::VALID_TEXT_DESCRIPTION);
            text.parse::<T>().map_err(build_invalid_message)
        });
        reader.ok_or_report(secret, value.span()).map(Self)
    }

    fn describe_valid_values() -> String {
        "the name of a file that holds the secret, relative to this one".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string" })
    }
}
