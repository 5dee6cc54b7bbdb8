package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// object is the result of compiling one source for one architecture. In the cache its file begins with a
// SHA-256 digest of the file's name and content. So a damaged or renamed file is never used.
type object struct {
	image []byte
	log   string // what ptxas printed

	// Seconds of one processor: from the source to PTX, which other images may share, and from there to the
	// image.
	ptxSeconds, imageSeconds float64
}

// content is the part of an object's file that gob encodes. gob encodes exported fields only.
type content struct {
	Image                    []byte
	Log                      string
	PTXSeconds, ImageSeconds float64
}

func digest(path string, encoded []byte) [sha256.Size]byte {
	return sha256.Sum256(append([]byte(filepath.Base(path)+"\n"), encoded...))
}

// read reads a file that write wrote.
func (o *object) read(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if len(data) < sha256.Size || digest(path, data[sha256.Size:]) != [sha256.Size]byte(data[:sha256.Size]) {
		return fmt.Errorf("%s does not match its digest", path)
	}
	var c content
	if err := gob.NewDecoder(bytes.NewReader(data[sha256.Size:])).Decode(&c); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	*o = object{c.Image, c.Log, c.PTXSeconds, c.ImageSeconds}
	return nil
}

func (o *object) write(path string) error {
	var encoded bytes.Buffer
	c := content{o.image, o.log, o.ptxSeconds, o.imageSeconds}
	if err := gob.NewEncoder(&encoded).Encode(c); err != nil {
		return err
	}
	sum := digest(path, encoded.Bytes())
	return writeFile(path, append(sum[:], encoded.Bytes()...))
}

// temporaryPrefix begins the names of files that are still being written.
const temporaryPrefix = ".new-"

// writeFile replaces a file atomically: it writes a temporary file and renames it. So no other process reads
// an incomplete file. It syncs the data before the rename, and the folder after it. So a crash of the machine
// leaves no incomplete file either.
func writeFile(path string, data []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), temporaryPrefix)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	err = errors.Join(err, file.Chmod(0o644), file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return syncFolder(filepath.Dir(path))
}

// syncFolder makes renames in a folder durable.
func syncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}

// removeAbandoned removes temporary files that are older than an hour. Writing a file takes far less time, so
// the processes that wrote them were killed.
func removeAbandoned(folder string) error {
	paths, err := filepath.Glob(filepath.Join(folder, temporaryPrefix+"*"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil || time.Since(info.ModTime()) < time.Hour {
			continue // already removed, or in use
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
