//! The file, its lock, and how a new one takes its place.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use super::{super::LedgerError, format::MOST_FILE};

/// What the writer does with the file. Every error of it counts as the loss of whatever was not synced.
pub(super) trait Disk: Send + 'static {
    /// Adds these bytes to the end.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Makes what was appended outlast a crash of the machine.
    fn sync(&mut self) -> io::Result<()>;
    /// Takes back what was appended beyond that length, as far as that is possible.
    fn cut(&mut self, length: u64);
    /// Puts a file of these bytes in its place, which are synced when this returns.
    fn replace(&mut self, bytes: &[u8]) -> Result<(), ReplaceError>;
}

/// Which file is there now.
#[derive(Debug)]
pub(super) enum ReplaceError {
    /// The old one, as it was.
    Untouched(io::Error),
    /// A crash of the machine may find either.
    Uncertain(io::Error),
}

impl ReplaceError {
    pub(super) fn into_inner(self) -> io::Error {
        match self {
            Self::Untouched(error) | Self::Uncertain(error) => error,
        }
    }
}

/// A file, locked for as long as this lives.
#[derive(Debug)]
pub(super) struct FileDisk {
    /// Where it is, all links followed, so that a new one takes the place of the file and not of a link.
    path: PathBuf,
    file: File,
    /// Where the file itself cannot be locked.
    _beside: Option<File>,
}

/// How often it is tried to lock the file, and how long it is waited between: a child that its owner was about to
/// start when it was killed has the lock until it runs its program, and the file may be replaced meanwhile.
const TRIES: usize = 10;
const BETWEEN: Duration = Duration::from_millis(10);

impl FileDisk {
    /// Opens and locks a file, which is made if it is not there, and reads it.
    pub(super) fn open(path: &Path) -> Result<(Self, Vec<u8>), LedgerError> {
        for attempt in 0..TRIES {
            if attempt > 0 {
                thread::sleep(BETWEEN);
            }
            match fs::metadata(path) {
                Ok(there) if !there.is_file() => return Err(invalid("it is not a regular file")),
                // Said by its mode, which does not hold for everybody.
                Ok(there) if there.permissions().readonly() => {
                    return Err(unavailable(io::ErrorKind::PermissionDenied.into()));
                }
                _ => {}
            }
            let file = options().read(true).create(true).truncate(false).open(path).map_err(unavailable)?;
            let path = fs::canonicalize(path).map_err(unavailable)?;
            let beside = match lock::take(&file, &path) {
                Err(LedgerError::InUse) => continue,
                taken => taken?,
            };
            // Whoever had the lock may have put a new file in its place since this one was opened.
            if !lock::is_at(&file, &path).map_err(unavailable)? {
                continue;
            }
            let mut disk = Self { path, file, _beside: beside };
            let bytes = disk.read()?;
            return Ok((disk, bytes));
        }
        Err(LedgerError::InUse)
    }

    fn read(&mut self) -> Result<Vec<u8>, LedgerError> {
        let length = self.file.metadata().map_err(unavailable)?.len();
        if length > MOST_FILE {
            return Err(LedgerError::Damaged("it is larger than a ledger can be".into()));
        }
        let mut bytes = Vec::new();
        (&self.file).take(MOST_FILE).read_to_end(&mut bytes).map_err(unavailable)?;
        Ok(bytes)
    }

    /// Writes a new file beside the old one.
    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = options().create_new(true).open(path)?;
        lock::take_again(&file)?;
        lock::same_owner(&self.file, &file)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(file)
    }
}

impl Drop for FileDisk {
    fn drop(&mut self) {
        // To close it is not enough while a child of this process is about to run its program.
        lock::release(&self.file);
    }
}

impl Disk for FileDisk {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        // A file that nobody finds is no ledger.
        match lock::is_at(&self.file, &self.path)? {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::NotFound, "the ledger's file was replaced")),
        }
    }

    fn cut(&mut self, length: u64) {
        let _ = self.file.set_len(length);
    }

    fn replace(&mut self, bytes: &[u8]) -> Result<(), ReplaceError> {
        let new = beside(&self.path, ".new");
        let written =
            self.write_new(&new, bytes).and_then(|file| match lock::is_at(&self.file, &self.path)? {
                true => Ok(file),
                false => Err(io::Error::new(io::ErrorKind::NotFound, "the ledger's file was replaced")),
            });
        let file = written.map_err(|error| {
            let _ = fs::remove_file(&new);
            ReplaceError::Untouched(error)
        })?;
        fs::rename(&new, &self.path).map_err(ReplaceError::Uncertain)?;
        self.file = file;
        lock::sync_directory(&self.path).map_err(ReplaceError::Uncertain)
    }
}

/// How the files are opened: for writing, and for nobody else to read.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(OsString::from(suffix));
    name.into()
}

fn unavailable(error: io::Error) -> LedgerError {
    LedgerError::Unavailable(error.into())
}

fn invalid(why: &'static str) -> LedgerError {
    unavailable(io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// The file itself is locked, and its successor before it takes its place, so that no other name of it leads
/// past the lock. The kernel lets go of it with the last copy of the descriptor, which is closed in whatever
/// program a child runs.
#[cfg(unix)]
mod lock {
    use std::os::unix::fs::{MetadataExt, fchown};

    use rustix::{
        fs::{FlockOperation, flock},
        io::Errno,
    };

    use super::*;

    pub(super) fn take(file: &File, _: &Path) -> Result<Option<File>, LedgerError> {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(None),
            Err(Errno::WOULDBLOCK) => Err(LedgerError::InUse),
            Err(error) => Err(unavailable(error.into())),
        }
    }

    pub(super) fn take_again(file: &File) -> io::Result<()> {
        Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
    }

    pub(super) fn release(file: &File) {
        let _ = flock(file, FlockOperation::Unlock);
    }

    /// Whether that file is the one at that path.
    pub(super) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
        let this = file.metadata()?;
        match fs::metadata(path) {
            Ok(there) => Ok((this.dev(), this.ino()) == (there.dev(), there.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives a new file the mode of the old one and, where that is allowed, its owner.
    pub(super) fn same_owner(old: &File, new: &File) -> io::Result<()> {
        let old = old.metadata()?;
        let _ = fchown(new, Some(old.uid()), Some(old.gid()));
        new.set_permissions(old.permissions())
    }

    /// A name is stored for good only with its directory.
    pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
        File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

/// A file beside it that nobody else can open.
#[cfg(windows)]
mod lock {
    use std::os::windows::fs::OpenOptionsExt;

    use super::*;

    /// `ERROR_SHARING_VIOLATION`.
    const SHARED: i32 = 32;

    pub(super) fn take(_: &File, path: &Path) -> Result<Option<File>, LedgerError> {
        match options().create(true).truncate(false).share_mode(0).open(beside(path, ".lock")) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.raw_os_error() == Some(SHARED) => Err(LedgerError::InUse),
            Err(error) => Err(unavailable(error)),
        }
    }

    pub(super) fn take_again(_: &File) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn release(_: &File) {}

    pub(super) fn is_at(_: &File, path: &Path) -> io::Result<bool> {
        fs::exists(path)
    }

    pub(super) fn same_owner(_: &File, _: &File) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn sync_directory(_: &Path) -> io::Result<()> {
        Ok(())
    }
}

/// Where no lock is known there is no ledger.
#[cfg(not(any(unix, windows)))]
mod lock {
    use super::*;

    pub(super) fn take(_: &File, _: &Path) -> Result<Option<File>, LedgerError> {
        Err(unavailable(io::ErrorKind::Unsupported.into()))
    }

    pub(super) fn take_again(_: &File) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn release(_: &File) {}

    pub(super) fn is_at(_: &File, path: &Path) -> io::Result<bool> {
        fs::exists(path)
    }

    pub(super) fn same_owner(_: &File, _: &File) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn sync_directory(_: &Path) -> io::Result<()> {
        Ok(())
    }
}
